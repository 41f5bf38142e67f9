def recorded_cases():
    return []
