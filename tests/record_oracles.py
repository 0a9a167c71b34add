"""Record what qualification compares with: likelihood, needles, answers and (GLM) tokens of an engine that is not ours.

    python tests/record_oracles.py qwen25-coder-0.5b smollm2-135m gemma3-270m nano-qwen3_5 nano-glm5-next

GGUF models run in llama.cpp, the nano models in transformers in float32, nano-glm5-next on the weights that gguf-py
decodes from the very file that ships. The fixed text's likelihood (and for GLM the greedy tokens of the recorded
prompts) goes into measure/oracles/<profile>.json; needles found and questions answered are printed, for the records'
`recall` and `task_score`. Needs llama-cpp-python, transformers, gguf, and the trained nano checkpoints.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import nano_models
import numpy as np
import torch
from hybrid_driver import HybridDriver

from slimserve.fetch import locate
from slimserve.measure import gates, gates_needles, questions
from slimserve.profiles.record import ProfileRecord
from slimserve.profiles.registry import find_record
from slimserve.weights.loader import load_model

FOLDER = Path(gates.__file__).parent / "oracles"
Draft = Callable[[list[int], int], list[int]]
"""Tokens and a count to that many tokens that may follow."""


class LlamaCpp:
    """The peer on a GGUF file."""

    def __init__(self, record: ProfileRecord) -> None:
        import llama_cpp

        path = locate(record.model.files[0])
        assert path is not None, f"slimserve fetch {record.name} first"
        build = partial(llama_cpp.Llama, str(path), n_batch=512, n_threads=2, n_threads_batch=2, verbose=False)
        self.llama = build(n_ctx=6144)
        self.scorer = build(n_ctx=gates.LIKELIHOOD_TOKENS, logits_all=True)
        self._logits_of = llama_cpp.llama_get_logits_ith
        self.source = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}, CPU, f16 keys and values)"
        self.plain = partial(self._ids, False)
        self.marked = partial(self._ids, True)

    def _ids(self, mark: bool, text: str) -> list[int]:
        return list(self.llama.tokenize(text.encode(), add_bos=mark, special=False))

    def chat_ids(self, text: str) -> list[int]:
        raise NotImplementedError("needles of GGUF profiles are sentences to continue")

    def scores(self, tokens: list[int]) -> np.ndarray:
        """Log probabilities [T, V] after every token."""
        self.scorer.reset()
        self.scorer.eval(tokens)
        logits = torch.from_numpy(self.scorer.scores[: len(tokens)].copy())
        return torch.log_softmax(logits.double(), dim=-1).numpy()

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        self.llama.reset()
        self.llama.eval(tokens)
        made: list[int] = []
        for _ in range(count):
            pointer = self._logits_of(self.llama._ctx.ctx, -1)
            made.append(int(np.ctypeslib.as_array(pointer, (self.llama.n_vocab(),)).argmax()))
            self.llama.eval(made[-1:])
        return made

    def answer(self, question: str) -> str:
        reply: Any = self.llama.create_chat_completion(
            [{"role": "user", "content": question}], temperature=0.0, max_tokens=questions.LONGEST_ANSWER,
            repeat_penalty=1.0,
        )  # fmt: skip
        return str(reply["choices"][0]["message"]["content"])


class Transformers:
    """The makers' own code in float32, eager."""

    KINDS: ClassVar = {
        nano_models.QWEN: "Qwen3_5ForConditionalGeneration",
        nano_models.GLM: "Glm5NextForConditionalGeneration",
    }

    def __init__(self, record: ProfileRecord) -> None:
        import transformers

        folder = nano_models.WHOLE / record.name
        self.source = f"transformers {transformers.__version__}, eager attention, float32, CPU"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        load = partial(getattr(transformers, self.KINDS[record.name]).from_pretrained, dtype=torch.float32)
        with tempfile.TemporaryDirectory() as scratch:
            if record.name == nano_models.GLM:
                folder = decoded_folder(folder, nano_models.packaged(record.name), Path(scratch))
                self.source += ", on the weights that gguf-py decodes from the file"
            self.model = load(folder, attn_implementation="eager").eval()
        self.marked = lambda text: list(tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def scores(self, tokens: list[int]) -> np.ndarray:
        """Log probabilities [T, V] after every token."""
        logits = self.model(input_ids=torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.double(), dim=-1).numpy()


def decoded_folder(folder: Path, file: Path, target: Path) -> Path:
    """The checkpoint folder with every weight as gguf-py decodes it from the packaged file, in float32."""
    import gguf
    from safetensors.torch import load_file, save_file

    from slimserve.models.glm5_gguf import gguf_form
    from slimserve.weights.loader import read_config
    from slimserve.weights.source import open_source

    tensors = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    config: Any = read_config(open_source(folder))[1]
    own = {spec.name: spec for spec in config.parameters()}
    specs = {spec.gguf_name: spec for spec in gguf_form(config).parameters()}
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        spec = specs[tensor.name]
        plain = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).copy())
        hf = own.get(spec.name)
        if hf is None:  # keys (transposed per head) and values of kv_b, which the checkpoint keeps together
            stem, _, part = spec.name.removesuffix(".weight").rpartition(".")
            halves.setdefault(stem, {})[part] = plain
        elif hf.hf_transform.kind == "stack_experts":
            for expert in range(hf.hf_transform.argument):
                _replace(tensors, hf.hf_name.format(expert=expert), plain[expert])
        else:
            _replace(tensors, hf.hf_name, plain)
    for stem, parts in halves.items():
        heads = torch.cat([parts["k_b"].transpose(1, 2), parts["v_b"]], dim=1)
        _replace(tensors, own[f"{stem}.kv_b.weight"].hf_name, heads.flatten(0, 1))
    save_file({name: value.float().contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    for path in folder.glob("*.json"):
        if not path.name.endswith(".index.json"):
            (target / path.name).write_bytes(path.read_bytes())
    return target


def _replace(tensors: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    """Put a decoded tensor in the place of the trained one, which must be near it."""
    before = tensors[name].float()
    value = value.reshape(before.shape)
    apart = float((value - before).norm() / before.norm().clamp(min=1e-12))
    assert apart < 0.15, f"{name}: {apart:.3f} from the trained weight, so it is another tensor or transposed"
    tensors[name] = value


def record_case(engine: Transformers, prompt: list[int], name: str, guess: Draft, count: int = 48) -> dict[str, Any]:
    """One prompt's greedy tokens, each with by how much the engine preferred it.

    `guess` proposes how the tokens go on; only those that are the engine's own choice are kept, so it saves passes and
    decides nothing.
    """
    output: list[int] = []
    margins: list[float] = []
    while len(output) < count:
        proposed = guess([*prompt, *output], count - len(output))
        rows = engine.scores([*prompt, *output, *proposed[:-1]])[len(prompt) + len(output) - 1 :]
        for row, token in zip(rows, proposed, strict=True):
            second, first = np.sort(row)[-2:]
            output.append(int(row.argmax()))
            margins.append(round(float(first - second), 4))
            if output[-1] != token:
                break
    print(f"  {name}: recorded", flush=True)
    return {"name": name, "prompt_token_ids": prompt, "output_token_ids": output, "margins": margins}


def main(names: list[str]) -> None:
    for name in names:
        record = find_record(name)
        engine = Transformers(record) if name in Transformers.KINDS else LlamaCpp(record)
        path = FOLDER / f"{name}.json"
        oracle = json.loads(path.read_text(encoding="utf-8"))
        if name == nano_models.GLM:
            model = load_model(nano_models.packaged(name)).model
            oracle["cases"] = [
                record_case(engine, c["prompt_token_ids"], c["name"], HybridDriver(model).greedy)
                for c in oracle["cases"]
            ]
            oracle["source"] = f"{engine.source}; greedy, end tokens ignored"
        ids = gates.likelihood_ids(engine.marked)
        rows = engine.scores(ids)[:-1]
        nats = -float(np.mean([row[token] for row, token in zip(rows, ids[1:], strict=True)]))
        oracle["likelihood"] = {"tokens": gates.digest(ids), "nats_per_token": nats, "source": engine.source}
        path.write_text(json.dumps(oracle, separators=(",", ":")), encoding="utf-8")
        print(f"{name}: {engine.source}\n  likelihood {nats:.5f} nat per token of {len(ids) - 1}", flush=True)
        if isinstance(engine, LlamaCpp):
            compare_tasks(record, engine)


def compare_tasks(record: ProfileRecord, engine: LlamaCpp) -> None:
    """Print the peer's needles and answers. (The nano models are held to their cards.)"""
    speech = gates_needles.Speech(engine.plain, engine.marked, engine.chat_ids)
    for length in record.qualify.needles:
        made = gates_needles.needles_of(
            speech, record.qualify.needle_style, length, gates_needles.trials_at(record.qualify, length)
        )  # fmt: skip
        found = [engine.greedy(list(n.prompt), len(n.answer)) == list(n.answer) for n in made]
        print(f"  needles at {length}: {sum(found)} of {len(found)}", flush=True)
    if record.qualify.task_score:
        answers = [engine.answer(question) for question, _ in questions.QUESTIONS]
        wrong = questions.wrong_answers(answers)
        print(f"  questions: {len(answers) - len(wrong)} of {len(answers)}; wrong: {' | '.join(wrong)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
