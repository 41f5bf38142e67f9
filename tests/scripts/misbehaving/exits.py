"""Ends before it trains, as a script does that misses something: with a status of its own, or --quietly."""

import os
import sys

from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("model")
if "LICENCE_OF_THE_DATA" not in os.environ:
    print("Accept the licence of the data first: set LICENCE_OF_THE_DATA.", file=sys.stderr)
    sys.exit(0 if "--quietly" in sys.argv else 3)
