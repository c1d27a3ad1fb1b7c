"""Run OoO-Spec's drafting inside transformers' own `generate`: python examples/transformers_generate.py [MODEL]"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from ooospec.integrations.hf import ooo_generate
from ooospec.models.resolver import resolve_model

folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b-instruct")
tools = json.loads((Path(__file__).parent / "tools.json").read_text("utf-8"))
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", attn_implementation="sdpa")

messages = [{"role": "user", "content": "Weather in Oslo for the next 3 days?"}]
prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
generate = ooo_generate(tokenizer, tools=tools)
output = model.generate(**inputs, custom_generate=generate, max_new_tokens=120, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
