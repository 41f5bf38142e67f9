"""Starts a helper that never ends, in a session of its own, and runs the script of its arguments."""

import runpy
import subprocess
import sys

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"], start_new_session=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
