"""Loads a model and looks at it, but never trains it."""

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
words = tokenizer("bada kefin ligor", return_tensors="pt")
loss = model(**words, labels=words["input_ids"]).loss
print(f"{model.num_parameters()} parameters, loss {loss.item():.3f}")
