/* Preloaded: the wall clock is a day ahead in every odd second and a day behind in every even one. CLOCK_MONOTONIC is
 * as it was, like on a machine whose time daemon goes mad. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>

static int real_clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, now);
}

static long jump(void) {
    struct timespec now;
    real_clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec % 2 ? 86400 : -86400;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = real_clock_gettime(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec real;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &real);
    now->tv_sec = real.tv_sec;
    now->tv_usec = real.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    if (result) *result = real.tv_sec;
    return real.tv_sec;
}
