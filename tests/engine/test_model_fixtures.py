import torch
from transformers import AutoTokenizer


def test_every_fixture_loads_and_speaks(
    tiny_llama, tiny_llama_untied, tiny_llama_72, tiny_gpt2, tiny_moe, tiny_llama_bf16, load_tiny
):
    for path in (tiny_llama, tiny_llama_untied, tiny_llama_72, tiny_gpt2, tiny_moe, tiny_llama_bf16):
        model, masters = load_tiny(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = tokenizer("a b [x]\n", return_tensors="pt").input_ids
        assert tokenizer.decode(ids[0]) == "a b [x]\n"
        with torch.inference_mode():
            assert torch.isfinite(model(ids).logits).all()
        assert masters.names()
