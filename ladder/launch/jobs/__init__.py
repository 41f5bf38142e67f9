"""Trials in Slurm jobs that ladder submits itself, from a login node.

Each node of a job runs the agent that `nodes` knows. Its pipe leads through files in a folder that all nodes see, so no
port is opened. submitit submits and watches the jobs; a keeper beside the tune owns one job and cancels it when the
tune ends, however it ends.
"""
