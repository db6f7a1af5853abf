"""Writes a tiny Llama with random weights and a tokenizer of its own into the directory named by the argument.

Nothing is downloaded. The weights are the same on every machine: what two engines make of one prompt can be compared.
They are large, so that the greedy answer depends on every token of the prompt, and so on the KV cache that was moved.
Only tokens of printable ASCII can win, so that every piece of a streamed answer is whole text.
"""

import pathlib
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
CONTEXT = 4096
SEED = 20

# Enough different letter pairs for a few hundred merges.
SENTENCES = [
    "A tandem has two seats, and both riders pedal.",
    "The first worker reads the prompt, the second one writes the answer.",
    "Keys and values travel from one memory to another over the wire.",
    "Which river runs through the largest city of the northern province?",
    "Numbers: zero 0, one 1, two 2, three 3, four 4, five 5, six 6, seven 7, eight 8, nine 9.",
    "Please explain quickly why jumping wizards vex both dogs and foxes.",
]

TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|pad|>", "<|turn|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>", model_max_length=CONTEXT
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def llama(words):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that the CPU attention of vLLM takes
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).to(torch.float32)
    special = set(words.all_special_ids)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                weights.normal_(0, 0.5 if "embed" in name else 0.12)
        for token in range(VOCABULARY):
            text = words.decode([token]) if token < len(words) else ""
            if token in special or not text or not (text.isascii() and text.isprintable()):
                model.lm_head.weight[token] = 0  # a logit of 0 never is the largest of some hundred random ones
    return model


def main():
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    words.save_pretrained(directory)
    llama(words).save_pretrained(directory)


main()
