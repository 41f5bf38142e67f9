# mypy: disable-error-code="import-untyped, import-not-found"
"""Needs a package that is not there."""

import a_package_that_nobody_has
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("model")
a_package_that_nobody_has.train(model)
