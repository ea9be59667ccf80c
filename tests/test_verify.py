"""`windlass verify` against a server over transformers and PEFT, with planted faults: each is named."""

import copy
import json
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from windlass import cli, tiny
from windlass.data.prepare import prepare_data
from windlass.export import export
from windlass.files import read_json, write_json
from windlass.model import read_base
from windlass.plan import make_plan
from windlass.plan.layout import Layout
from windlass.run_folder import BASE_MODEL, PROBE
from windlass.runfile import read_run_file
from windlass.runfile.recorded import record_run
from windlass.serve import client
from windlass.serve.hypotheses import list_hypotheses
from windlass.serve.probe import find_probe, hash_probe
from windlass.serve.verify import APPLIED, AS_BASE, EXPORT, IN_PART, UNDECIDED, Verdict, verify
from windlass.train.kernels.products import as_served, grouped_linear
from windlass.train.load import load_base
from windlass.train.logits import open_adapter
from windlass.train.patches import Patches
from windlass.train.probe import write_probe
from windlass.weights.same_base import describe_base, digest_files

pytestmark = [
    pytest.mark.xdist_group("verify"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]
OTHER_TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m['content'] }}{{ eos_token }}{% endfor %}"
RUN = """
model: {{model_name_or_path: {base}, torch_dtype: float32}}
lora: {{r: 4, lora_alpha: 8, target_modules: [q_proj, v_proj]}}
data: {{dataset_name_or_path: {rows}, dataset_config_name: null, max_length: 64, val_fraction: 0.3}}
train: {{output_dir: {folder}, max_steps: 1, gradient_accumulation_steps: 1}}
cluster: {{gpu: cpu}}
"""


@dataclass
class Stub:
    """An OpenAI-compatible server over a model's real forward."""

    model: Any
    tokenizer: Any
    name: str = "mine"
    way: str = "prompt_logprobs"  # in which it gives log-probabilities; "echo", "forced", "none"
    template: str | None = None
    thoughts: str = ""  # what it writes before an answer that it leaves open
    refuses: str = ""  # to tokenize chats whose last message has this role
    answers: bool = True  # chats
    penalty: float = 1.0  # of tokens that were there already, as the model's generation_config.json says
    swallows: bool = False  # a token of its log-probabilities, which ends within a character
    asked: list[Any] = field(default_factory=list)  # messages
    most: int = 512  # tokens of a prompt
    cut: int = 0  # tokens missing from its log-probabilities
    key: str = ""
    tokens: Any = None  # what /tokenize answers; None: tokens
    decoder: Any = None  # another model, which decodes
    busy: list[int] = field(default_factory=list)  # what it answers first; 0: it hangs up, 1: in the middle
    later: str = "7"  # when a busy one wants to be asked again
    computed: dict[Any, Tensor] = field(default_factory=dict)  # log-probabilities by model and row

    @torch.no_grad()
    def log_probs(self, ids: list[int], model: Any = None) -> Tensor:
        key = (model or self.model, *ids)
        if key not in self.computed:
            logits = key[0](input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            self.computed[key] = torch.log_softmax(logits.float(), -1)
        return self.computed[key]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = list(body["prompt"])
        if len(ids) > self.most:
            raise ValueError(f"maximum context length is {self.most} tokens")
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        log_probs = self.log_probs(ids)
        of_prompt = [float(log_probs[i - 1, ids[i]]) for i in range(1, len(ids) - self.cut)]
        if self.way == "prompt_logprobs" and "prompt_logprobs" in body:
            pairs = zip(ids[1:], of_prompt, strict=False)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in pairs)]
        new: list[int] = []
        values = []
        for _ in range(body["max_tokens"]):
            known = not new and self.decoder is None
            following = (log_probs if known else self.log_probs([*ids, *new], self.decoder))[-1]
            biased = following.clone()
            seen = [*ids, *new]
            biased[seen] *= body.get("repetition_penalty", self.penalty)
            for token, bias in body.get("logit_bias", {}).items():
                biased[int(token)] += bias
            new.append(int(biased.argmax()))
            values.append(float(following[new[-1]]))
        choice["text"] = self.tokenizer.decode(new)
        if self.way != "none" and "logprobs" in body:
            if self.way == "forced":  # as llama.cpp's
                content = [{"id": token, "logprob": value} for token, value in zip(new, values, strict=True)]
                choice["logprobs"] = {"content": content[: 1 if self.swallows else None]}
                choice["finish_reason"] = "length"
            else:
                before = [None, *of_prompt] if body.get("echo") and self.way == "echo" else []
                choice["logprobs"] = {"token_logprobs": [*before, *values]}
        if body.get("return_token_ids") and self.way != "none":
            choice["token_ids"] = new
        return choice

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            self.asked += body["messages"]
            if self.refuses and self.refuses in (body["messages"][-1]["role"], "any"):
                raise ValueError("Expected last role User")
            return [] if self.way == "forced" else list(self.render(body, return_dict=False))
        if "prompt" not in body:
            return list(self.tokenizer(body["content"], add_special_tokens=False)["input_ids"])
        return list(self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"])

    def render(self, body: dict[str, Any], **chosen: Any) -> Any:
        chosen = {"chat_template": self.template, "tools": body.get("tools"), **chosen}
        return self.tokenizer.apply_chat_template(body["messages"], **chosen)

    def leave_open(self, body: dict[str, Any]) -> str:
        """Render a chat as llama.cpp does: up to the end of the last answer's text, with empty thoughts before it."""
        *_, last = body["messages"]
        if last["role"] != "assistant":
            return str(self.render(body, tokenize=False))
        before, answer, _ = self.render(body, tokenize=False).rpartition(last["content"])
        return f"{before}{self.thoughts}{answer}"

    @contextmanager
    def served(self) -> Iterator[str]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return

            def answer(self, code: int, value: Any) -> None:
                content = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def fail(self, code: int) -> None:
                if code > 1:
                    self.send_response(code)
                    self.send_header("Retry-After", stub.later)
                    self.send_header("Content-Length", "4")
                    self.end_headers()
                    self.wfile.write(b"full")
                elif code:
                    self.send_response(200)
                    self.send_header("Content-Length", "100")
                    self.end_headers()
                    self.wfile.write(b"{")
                self.close_connection = True

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": stub.name}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if stub.busy:
                    return self.fail(stub.busy.pop(0))
                if stub.key and self.headers["Authorization"] != f"Bearer {stub.key}":
                    return self.answer(401, {"error": "no"})
                try:
                    if self.path == "/tokenize":
                        return self.answer(200, {"tokens": stub.tokens or stub.tokenize(body)})
                    if self.path == "/apply-template" and stub.way == "forced":
                        return self.answer(200, {"prompt": stub.leave_open(body)})
                    if self.path == "/v1/chat/completions" and not stub.answers:
                        return self.answer(400, {"error": {"message": "no chat template"}})
                    if self.path == "/v1/chat/completions":
                        return self.answer(200, {"choices": [{}]})
                    if self.path == "/v1/completions" and body["model"] == stub.name:
                        return self.answer(200, {"choices": [stub.complete(body)]})
                except ValueError as error:
                    return self.answer(400, {"error": {"message": str(error)}})
                return self.answer(404, {"error": {"message": f"no {self.path}"}})

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def verify(self, folder: Path, **options: Any) -> Verdict:
        with self.served() as url:
            chosen = {"model": "mine", "key": None, "key_variable": "KEY", "say": lambda _: None, **options}
            return verify(url, folder, **chosen)


# --- an export of a run on chats, and the models that servers make of it ---


def plain_model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def adapted_model(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(plain_model(base), str(adapter)).eval()


def write_adapter(base: Path, to: Path, std: float = 0.6, **config: Any) -> None:
    """Save a random adapter as PEFT does; `std`: of lora_B."""
    torch.manual_seed(3)
    model = get_peft_model(plain_model(base), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=std)
    model.save_pretrained(str(to), save_embedding_layers=False)


@dataclass
class Exported:
    base: Path
    adapter: Path
    folder: Path
    tokenizer: Any
    computed: dict[Any, Tensor] = field(default_factory=dict)  # of all its servers: most are asked for the same rows

    @cached_property
    def adapted(self) -> Any:
        return adapted_model(self.base, self.adapter)

    @cached_property
    def plain(self) -> Any:
        return plain_model(self.base)

    def stub(self, model: Any = None, **options: Any) -> Stub:
        return Stub(self.adapted if model is None else model, self.tokenizer, computed=self.computed, **options)

    def changed(self, to: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Any:
        """Return the model with another adapter: its tensors and configuration changed."""
        shutil.copytree(self.adapter, to)
        tensors = load_file(to / "adapter_model.safetensors")
        config = read_json(to / "adapter_config.json")
        change(tensors, config)
        save_file(tensors, to / "adapter_model.safetensors", {"format": "pt"})
        write_json(to / "adapter_config.json", config)
        return adapted_model(self.base, to)


def export_a_run(folder: Path, family: str, chats: list[Any], adapter: dict[str, Any], **data: Any) -> Exported:
    """Return an export of a run on chats, whose adapter is random."""
    base = tiny.write_model(folder / "base", family, dtype="float32")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "run.yaml").write_text(RUN.format(base=base, rows=folder / "rows.jsonl", folder=folder / "run"))
    given = [f"data.{key}={value}" for key, value in data.items()]
    run = make_plan(read_run_file(folder / "run.yaml", given)).run
    tokenizer = AutoTokenizer.from_pretrained(base)
    prepare_data(run, tokenizer, say=lambda _: None)
    write_json(folder / "run" / "manifest.json", {"run": record_run(run)})
    write_adapter(base, folder / "run" / "final", **adapter)
    export(folder / "run", folder / "out", base=str(base), say=lambda _: None)
    return Exported(base, folder / "run" / "final", folder / "out", tokenizer)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """An export of a run on chats, of a mixture with adapters on attention and experts."""
    words = ["anchor", "bark", "cable", "deck", "eddy", "fathom", "galley", "hull"]
    chats = []
    for n in range(60):
        asked, answer = (" ".join(words[(n * k + start) % 8] for k in range(1, 10)) for start in (0, 3))
        chats.append([{"role": "user", "content": f"{n} {asked}"}, {"role": "assistant", "content": answer}])
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = {"target_modules": ["q_proj", "v_proj"], "target_parameters": stacks}
    return export_a_run(tmp_path_factory.mktemp("mixture"), "mixtral", chats, adapter)


def make_dense(folder: Path, std: float = 0.6, **options: Any) -> Exported:
    """Return an export of an adapter without a run."""
    base = tiny.write_model(folder / "base", "llama", **options)
    plain = folder / "plain"  # for PEFT, the same without quantization
    tiny.write_model(plain, "llama", **{**options, "quantization": "none"})
    write_adapter(plain, folder / "adapter", std, target_modules=["q_proj", "down_proj"])
    export(folder / "adapter", folder / "out", base=str(base), say=lambda _: None)
    return Exported(base, folder / "adapter", folder / "out", AutoTokenizer.from_pretrained(base))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make_dense(tmp_path_factory.mktemp("dense"), dtype="float32")


def test_the_adapter_is_applied(mixture: Exported) -> None:
    probe = read_json(mixture.folder / PROBE)
    assert probe["rows_from"] == "the run's validation rows"
    assert sum("chat" in row for row in probe["rows"]) == 12
    assert (mixture.folder / PROBE).stat().st_size < 200_000
    result = mixture.stub().verify(mixture.folder)
    assert result.passed
    assert result.nearest == "adapter"
    assert result.errors["adapter"]["median"] < 1e-4
    assert result.errors["base"]["mean"] > 0.05
    assert "decoded: 32 of 32" in result.notes[0]
    assert "chat template: 12 of 12" in result.notes[1]


def drop(*names: str) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        dropped = [name for name in tensors if "lora_B" in name and any(part in name for part in names)]
        assert dropped
        for name in dropped:
            tensors[name].zero_()

    return change


def halve(_tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["lora_alpha"] /= 2


def repack(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Pack lora_B of 8 experts with r = 4 by expert and then rank."""
    for name in tensors:
        if ".experts." in name and "lora_B" in name:
            b = tensors[name]
            tensors[name] = b.view(len(b), 8, 4).transpose(1, 2).reshape(b.shape).contiguous()


@pytest.mark.fault("a server that ignores the adapter", "`windlass verify`", "answers as the base")
def test_a_server_without_the_adapter(mixture: Exported) -> None:
    result = mixture.stub(mixture.plain).verify(mixture.folder)
    assert (result.verdict, result.passed) == (AS_BASE, False)


@pytest.mark.fault(
    "a server that ignores a part of the adapter", "`windlass verify`", "fits the adapter … not as exported"
)
@pytest.mark.parametrize(
    ("change", "nearest"),
    [
        (drop(".experts."), "without experts"),
        (drop("q_proj"), "without q_proj"),
        (halve, "at 0.5 x its scale"),
        (repack, "with experts packed in another order"),
    ],
)
def test_an_adapter_applied_otherwise_is_named(
    change: Callable[[dict[str, Tensor], dict[str, Any]], None], nearest: str, mixture: Exported, tmp_path: Path
) -> None:
    result = mixture.stub(mixture.changed(tmp_path / "adapter", change)).verify(mixture.folder)
    assert (result.verdict, result.nearest, result.passed) == (IN_PART, nearest, False)
    assert "fits the adapter " in result.summary
    assert " not as exported" in result.summary


@pytest.mark.fault("a server with another base model", "`windlass verify`", "the server has another model")
def test_another_base(mixture: Exported, tmp_path: Path) -> None:
    other = tiny.write_model(tmp_path / "other", "mixtral", dtype="float32", seed=5)
    with refused("another-model") as problems:
        mixture.stub(adapted_model(other, mixture.adapter)).verify(mixture.folder)
    assert "the server has another model" in problems[0].problem


@pytest.mark.fault(
    "a server with another chat template", "`windlass verify`", "chat template is another than … it was 4 in training"
)
def test_another_chat_template_is_named_with_its_first_token(mixture: Exported) -> None:
    result = mixture.stub(template=OTHER_TEMPLATE).verify(mixture.folder)
    assert (result.verdict, result.passed) == (APPLIED, False)
    (problem,) = result.problems
    assert "chat template is another than " in problem
    assert "is 2, it was 4 in training" in problem  # </s> instead of [/INST]


@pytest.mark.parametrize(
    ("options", "up_to"),
    [
        ({"way": "forced"}, "up to the end of its answer's text"),
        ({"way": "forced", "thoughts": "<think></think>"}, "up to its last answer"),  # in no template
        ({"refuses": "assistant"}, "up to its last answer"),
    ],
)
@pytest.mark.takes("computes a model under many hypotheses")
def test_a_server_that_takes_no_answer_at_the_end(options: dict[str, Any], up_to: str, mixture: Exported) -> None:
    result = mixture.stub(**options).verify(mixture.folder)
    assert result.passed
    assert f"12 of 12 chats have the tokens trained on, {up_to}" in result.notes[1]
    (problem,) = mixture.stub(template=OTHER_TEMPLATE, **options).verify(mixture.folder).problems
    assert "is 2, it was 4 in training" in problem
    assert "--chat-template chat_template.jinja" in problem


@pytest.mark.fault(
    "a server without a chat template, for a run on chats", "`windlass verify`", "the server answers no chat: 400"
)
def test_a_server_that_refuses_all_chats(mixture: Exported) -> None:
    result = mixture.stub(refuses="any", answers=False).verify(mixture.folder)
    assert (result.verdict, result.passed) == (APPLIED, False)
    (problem,) = result.problems
    assert "the server answers no chat: 400: no chat template" in problem
    result = mixture.stub(refuses="any").verify(mixture.folder)  # its /tokenize takes texts alone
    assert result.passed
    assert result.notes[1].startswith("chat template: not compared, since the server has no /tokenize")


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda row: row.get("chat", {}).update(dates=["28 Nov 2026"]), "it writes the day's date: 28 Nov 2026"),
        # Of text, or of an export on another day than the template wrote into the rows
        (lambda row: row.pop("chat", None), "no row of the probe is a chat"),
    ],
)
def test_chats_that_no_template_can_be_compared_by(
    change: Callable[[dict[str, Any]], object], note: str, mixture: Exported, tmp_path: Path
) -> None:
    folder = shutil.copytree(mixture.folder, tmp_path / "out")
    probe = read_json(folder / PROBE)
    for row in probe["rows"]:
        change(row)
    write_json(folder / PROBE, probe)
    write_json(folder / EXPORT, read_json(folder / EXPORT) | {"probe": hash_probe(folder / PROBE)})
    result = mixture.stub(template=OTHER_TEMPLATE).verify(folder)
    assert result.passed
    assert result.notes[1].startswith(f"chat template: not compared, {note}")


def test_thoughts_have_every_servers_name(mixture: Exported) -> None:
    stub = mixture.stub()
    chat = {"messages": [{"role": "assistant", "content": "a", "thinking": "b"}]}
    with stub.served() as url:
        assert client.ServedModel(url, "mine").tokenize_chat(chat)
    assert [(message["reasoning"], message["reasoning_content"]) for message in stub.asked] == [("b", "b")]


@pytest.mark.parametrize("options", [{"penalty": 1.5}, {"way": "forced", "swallows": True}])
def test_what_a_server_makes_of_decoded_tokens(options: dict[str, Any], mixture: Exported) -> None:
    """Penalties for tokens that were there already are asked not to count; answers that lack tokens don't."""
    result = mixture.stub(**options).verify(mixture.folder)
    assert result.passed
    assert any(note.startswith("decoded: 32 of 32") for note in result.notes) is ("penalty" in options)


def test_chats_that_became_several_rows_are_compared_by_their_beginnings(tmp_path: Path) -> None:
    turns = [(role, k) for k in range(3) for role in ("user", "assistant")]
    rows = [[{"role": role, "content": f"{role} {n} {k}"} for role, k in turns] for n in range(20)]
    exported = export_a_run(tmp_path, "llama", rows, {"target_modules": ["q_proj"]}, turns="each")
    chats = [row["chat"] for row in read_json(tmp_path / "out" / PROBE)["rows"] if "chat" in row]
    assert {len(chat["messages"]) for chat in chats} >= {2, 4}
    result = exported.stub().verify(exported.folder)
    assert result.passed
    assert f"chat template: {len(chats)} of {len(chats)}" in result.notes[1]
    assert len(chats) == 12
    (problem,) = exported.stub(template=OTHER_TEMPLATE).verify(exported.folder).problems
    assert "chat template is another than " in problem


def test_an_adapter_that_decoding_ignores(mixture: Exported) -> None:
    result = mixture.stub(decoder=mixture.plain).verify(mixture.folder)
    assert (result.verdict, result.passed) == (APPLIED, False)
    assert "decoding differs" in result.problems[0]


@pytest.mark.parametrize("way", ["echo", "forced"])
@pytest.mark.takes("computes a model under many hypotheses")
def test_servers_that_give_less(way: str, dense: Exported) -> None:
    result = dense.stub(way=way).verify(dense.folder)
    assert (result.verdict, result.way, result.passed) == (APPLIED, way, True)
    result = dense.stub(dense.plain, way=way).verify(dense.folder)
    assert (result.verdict, result.passed) == (AS_BASE, False)


def test_a_server_without_log_probabilities(dense: Exported) -> None:
    with refused("no-logprobs"):
        dense.stub(way="none").verify(dense.folder)


@pytest.mark.takes("computes a model under many hypotheses")
def test_a_server_that_computes_in_fewer_bits(tmp_path: Path) -> None:
    exported = make_dense(tmp_path, quantization="tensor", layers=4)
    layout = Layout("resident", "test", 1, 1, shard=1, base_dtype="fp8")
    base, _ = load_base(read_base(exported.base), layout)
    adapted = open_adapter(base.eval(), exported.adapter)
    Patches().patch_experts(adapted)
    result = exported.stub(adapted).verify(exported.folder)
    assert result.passed
    assert 1e-4 < result.errors["adapter"]["largest"] < result.bound
    with adapted.disable_adapter():
        assert Stub(adapted, exported.tokenizer).verify(exported.folder).verdict == AS_BASE


def test_an_adapter_that_changes_nothing_measurable(tmp_path: Path) -> None:
    lines: list[str] = []
    exported = make_dense(tmp_path, std=1e-5)
    export(exported.adapter, exported.folder, base=str(exported.base), say=lines.append)
    assert "too little for a server in bf16" in lines[-2]
    assert "bfloat16 keeps 0 % of this adapter's effect" in lines[-1]
    base, _ = load_base(read_base(exported.base), Layout("resident", "test", 1, 1, shard=1))
    result = exported.stub(base.eval()).verify(exported.folder)
    assert (result.verdict, result.passed) == (UNDECIDED, False)


def test_what_bfloat16_keeps_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.observe.format.SERVED", 2.0)  # tiny models lose little
    exported = make_dense(tmp_path, std=0.02, layers=4)
    probe = read_json(exported.folder / PROBE)
    assert 0.9 < probe["kept"] < 1.1
    assert probe["rows"][0]["rounded"].keys() == probe["rows"][0]["logprobs"].keys()
    sentence = f"float16 keeps {100 * probe['kept']:.0f} % of this adapter's effect when it is served unmerged"
    assert sentence in (exported.folder / "README.md").read_text()


CPU = torch.device("cpu")


def test_linear_layers_are_rounded_before_their_adapter_is_added(dense: Exported) -> None:
    model = open_adapter(plain_model(dense.base), dense.adapter)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(5, layer.in_features)
    before = layer(x)
    with as_served(CPU):
        product = layer.base_layer(x)
        added = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
        assert torch.equal(layer(x), product + added)
        assert product.dtype == added.dtype == torch.bfloat16
        with model.disable_adapter():
            assert torch.equal(layer(x), product)
    assert torch.equal(layer(x), before)


def test_products_that_a_processor_only_emulates_are_those_of_autocast(
    dense: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for sums in another order, after which few values are rounded the other way."""
    layer = open_adapter(plain_model(dense.base), dense.adapter).base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(50, layer.in_features)
    exact, found = layer(x), []
    for has in (True, False):
        monkeypatch.setattr("windlass.train.kernels.products.has_bf16_products", lambda has=has: has)
        with torch.no_grad(), as_served(CPU):
            found.append(layer(x))
    by_autocast, by_hand = found
    assert by_hand.dtype == by_autocast.dtype == torch.bfloat16
    assert (by_hand == by_autocast).float().mean() > 0.95 > (exact == by_autocast).float().mean()
    assert torch.allclose(by_hand, by_autocast, rtol=2**-7, atol=1e-4)


def test_experts_products_are_rounded_before_their_adapter_is_added() -> None:
    """Two experts, whose base is in float32 with values of bfloat16."""
    experts = torch.nn.Module()
    experts.up = torch.nn.Parameter(torch.randn(2, 12, 8).bfloat16().float(), requires_grad=False)
    x = torch.randn(5, 8)
    added = torch.randn(5, 12) / 100
    offsets = torch.tensor([3, 5], dtype=torch.int32)
    with as_served(CPU):
        served = grouped_linear(x, experts, "up", offsets, added.clone())
    once = grouped_linear(x, experts, "up", offsets, added.clone())
    rows = x.bfloat16().float()
    product = torch.cat([rows[:3] @ experts.up[0].t(), rows[3:] @ experts.up[1].t()])
    assert torch.equal(served, (product.bfloat16() + added.bfloat16()).float())
    assert not torch.equal(served, once)


def test_scales_that_servers_take_by_mistake_are_among_the_hypotheses() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    more: dict[str, Any]
    for more, named in (
        ({}, []),
        ({"use_rslora": True}, ["lora_alpha / r everywhere"]),
        (
            {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
            ["lora_alpha / r everywhere", "lora_alpha / its own rank of each module"],
        ),
    ):
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more))
        found = [name.removeprefix("at the scale ") for name in list_hypotheses(adapted) if "at the scale" in name]
        assert found == named


def test_a_probe_of_an_older_windlass(dense: Exported, tmp_path: Path) -> None:
    folder = shutil.copytree(dense.folder, tmp_path / "export")
    probe = read_json(folder / PROBE)
    del probe["noise"]
    write_json(folder / PROBE, probe)
    with refused("older-probe") as problems:
        verify("http://127.0.0.1:9", folder, None, None, "KEY", print)
    assert problems[0].hint == "export again"
    assert find_probe(folder, folder) == {}


@pytest.mark.takes("computes a model under many hypotheses")
def test_what_makes_a_comparison_impossible(dense: Exported, tmp_path: Path) -> None:
    with refused("no-answer"):
        verify("http://127.0.0.1:9", dense.folder, None, None, "KEY", print)
    stub = dense.stub()
    with refused("no-such-model", "--model") as problems:
        stub.verify(dense.folder, model="other")
    assert "it has mine" in problems[0].hint
    with refused("refused-row") as problems:
        dense.stub(stub.model, most=20).verify(dense.folder)
    assert "maximum context length is 20 tokens" in problems[0].problem
    with refused("cut-short"):
        dense.stub(stub.model, cut=2).verify(dense.folder)
    with refused("no-access") as problems:
        dense.stub(stub.model, key="secret").verify(dense.folder)
    assert "KEY" in problems[0].hint
    assert dense.stub(stub.model, key="secret").verify(dense.folder, key="secret").passed
    tiny.write_tokenizer(tmp_path / "tokenizer", 400)
    with refused("other-tokenizer"):
        Stub(stub.model, AutoTokenizer.from_pretrained(tmp_path / "tokenizer")).verify(dense.folder)


@pytest.mark.fault("a server that is busy for longer than a minute", "`windlass verify`", "no answer: 503: full")
@pytest.mark.fault("a server that is back after more than a minute", "`windlass verify`", "no answer: 503: full")
def test_a_busy_server_is_asked_again(dense: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic, time=lambda: 1e9)
    monkeypatch.setattr(client, "time", clock)
    said: list[str] = []
    assert dense.stub(busy=[503, 0, 1, 429]).verify(dense.folder, say=said.append).passed
    waits = [line for line in said if line.startswith("waiting")]
    for words, line in zip(("503: full", "RemoteDisconnected", "IncompleteRead", "429: full"), waits, strict=True):
        assert words in line
    assert slept == [7, 2, 4, 7], "as it says, or twice as long each time"
    for later, pause in (
        ("Sun, 09 Sep 2001 01:46:45 GMT", 5),
        ("Sun, 09 Sep 2001 01:46:45", 5),  # without a zone: of Greenwich
        ("Sat, 08 Sep 2001 01:46:45 GMT", 0),
        ("1 Jan 99999999999999", 0),
    ):
        assert client.BusyError("", later).pause == pause
    slept.clear()
    for patience, later in ((0.0, "soon"), (60.0, "61")):
        monkeypatch.setattr(client, "PATIENCE", patience)
        with refused("busy") as problems:
            dense.stub(busy=[503] * 9, later=later).verify(dense.folder)
        assert problems[0].problem == "no answer: 503: full"
        assert "when it is not busy" in problems[0].hint
        assert slept == []
    assert "it was asked for 0 s, and would be again in 61 s" in problems[0].hint


@pytest.mark.fault("a server whose tokens are no numbers", "`windlass verify`", "chat template: not compared")
@pytest.mark.parametrize("tokens", [["a", "b"], [None]])
def test_a_server_whose_tokens_are_no_numbers(mixture: Exported, tokens: list[Any]) -> None:
    verdict = mixture.stub(tokens=tokens).verify(mixture.folder)
    assert verdict.passed
    assert [note for note in verdict.notes if note.startswith("chat template: not compared")]


def test_the_probe_of_another_export(dense: Exported, tmp_path: Path) -> None:
    other = tmp_path / "other"
    export(dense.adapter, other, base=str(dense.base), say=lambda _: None, probes=False)
    with refused("no-probe", PROBE):
        dense.stub(nn.Identity()).verify(other)
    shutil.copy(dense.folder / PROBE, other / PROBE)
    with refused("other-probe", PROBE):
        dense.stub(nn.Identity()).verify(other)


def test_the_command(dense: Exported, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with dense.stub(key="secret").served() as url, pytest.raises(SystemExit) as ended:
        cli.main(["verify", f"{url}/v1", str(dense.folder), "--json", "--api-key-env", "MY_KEY"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["passed"], printed["verdict"]) == (True, APPLIED)
    with dense.stub(dense.plain).served() as url, pytest.raises(SystemExit) as ended:
        cli.main(["verify", url, str(dense.folder), "--model", "mine"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("answers as the base, the adapter is not applied: ")
    with dense.stub(nn.Identity()).served() as url, pytest.raises(SystemExit) as ended:
        cli.main(["verify", url, str(dense.folder), "--model", "none"])
    assert ended.value.code == 2


def test_a_runs_own_probe_is_of_the_base_that_it_was_trained_on(mixture: Exported, tmp_path: Path) -> None:
    run = shutil.copytree(mixture.adapter.parent, tmp_path / "run")
    base = read_base(mixture.base)
    write_json(run / "final" / BASE_MODEL, describe_base(base, digest_files(base)))
    write_json(run / PROBE, read_json(mixture.folder / PROBE) | {"rows_from": "ranks"})
    other = tiny.write_model(tmp_path / "other", "mixtral", dtype="float32", seed=5)
    for folder, taken in ((mixture.base, True), (other, False)):
        to = tmp_path / f"merged into {folder.name}"
        export(run, to, merge=True, base=str(folder), allow_other_base=not taken, say=lambda _: None)
        assert (read_json(to / PROBE)["rows_from"] == "ranks") == taken


def test_a_share_that_few_tokens_leave_open_is_no_alarm(mixture: Exported, tmp_path: Path) -> None:
    run = shutil.copytree(mixture.adapter.parent, tmp_path / "run")
    probe = read_json(mixture.folder / PROBE)
    assert 0 < probe["kept_error"] < 1
    del probe["kept"], probe["kept_error"]
    for name, figures, warned in (
        ("open", {"kept": 0.8, "kept_error": 0.1}, False),
        ("older", {"kept": 0.8}, True),
    ):
        write_json(run / PROBE, probe | figures)
        lines: list[str] = []
        export(run, tmp_path / name, base=str(mixture.base), say=lines.append)
        assert any("bfloat16 keeps 80 %" in line for line in lines) == warned


@pytest.mark.takes("computes a model under many hypotheses")
def test_a_merged_model_has_the_same_probe(mixture: Exported, tmp_path: Path) -> None:
    export(mixture.adapter.parent, tmp_path / "merged", merge=True, base=str(mixture.base), say=lambda _: None)
    stub = mixture.stub(plain_model(tmp_path / "merged"))
    assert stub.verify(tmp_path / "merged").passed
    write_json(tmp_path / "merged" / "export.json", {"kind": "merged"})
    with refused("other-probe", PROBE):
        stub.verify(tmp_path / "merged")


@pytest.mark.parametrize("more", ["lora.bias=all", "lora.modules_to_save=[lm_head]"])
def test_ranks_that_train_the_base_too_leave_the_probe_to_the_export(more: str, mixture: Exported) -> None:
    plan = make_plan(read_run_file(mixture.folder.parent / "run.yaml", [more]))
    lines: list[str] = []
    nothing: Any = None
    write_probe(plan, nothing, nothing, nothing, lines.append)
    assert lines[0] == "probe     none: weights of the base were trained, and the ranks have no others to compare with"
    assert "--to FOLDER` computes it where the model fits into memory" in lines[1]


@pytest.mark.long
def test_two_ranks_write_the_probe_that_one_process_computes(mixture: Exported, tmp_path: Path) -> None:
    rows = mixture.folder.parent / "rows.jsonl"
    text = RUN.format(base=mixture.base, rows=rows, folder="run").replace(
        "[q_proj, v_proj]", "all-linear, experts: true"
    )
    text = text.replace("max_steps: 1", "max_steps: 3, learning_rate: 0.05, bf16: false, eval_steps: 3, save_steps: 3")
    text = text.replace("{gpu: cpu}", "{gpu: cpu, gpus_per_node: 2}")
    (tmp_path / "run.yaml").write_text(f"{text}layout: {{name: expert-parallel, expert_parallel: 2}}\n")
    command = [warm.python(), "-m", "windlass", "train", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    by_ranks = read_json(tmp_path / "run" / PROBE)
    lines: list[str] = []
    export(tmp_path / "run", tmp_path / "taken", base=str(mixture.base), say=lines.append)
    assert not any("loading" in line for line in lines)  # the run's own
    (tmp_path / "run" / PROBE).unlink()
    export(tmp_path / "run", tmp_path / "computed", base=str(mixture.base), say=lines.append)
    computed = read_json(tmp_path / "computed" / PROBE)
    assert read_json(tmp_path / "taken" / PROBE)["rows"] == by_ranks["rows"]
    assert len(by_ranks["rows"]) == len(computed["rows"]) == 16
    # Each rank has a part of the experts: not tried
    expected = {*computed["hypotheses"]} - {"with experts packed in another order"}
    assert {*by_ranks["hypotheses"]} == expected
    for one, other in zip(by_ranks["rows"], computed["rows"], strict=True):
        assert (one["ids"], one.get("chat")) == (other["ids"], other.get("chat"))
        common = [
            (one["positions"].index(i), other["positions"].index(i))
            for i in {*one["positions"]} & {*other["positions"]}
        ]
        assert len(common) > 4
        for name in expected:
            for i, j in common:
                assert math.isclose(one["logprobs"][name][i], other["logprobs"][name][j], abs_tol=1e-4), name
    stub = mixture.stub(open_adapter(plain_model(mixture.base), tmp_path / "taken"))
    assert stub.verify(tmp_path / "taken").passed


@pytest.mark.takes("computes a model under many hypotheses")
def test_trained_biases_are_a_part_of_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny.write_model(tmp_path / "base", "llama", dtype="float32", config={"attention_bias": True})
    model = get_peft_model(
        plain_model(base), LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], bias="lora_only")
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.6)
    model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    export(tmp_path / "adapter", tmp_path / "out", base=str(base), say=lambda _: None)
    exported = Exported(base, tmp_path / "adapter", tmp_path / "out", AutoTokenizer.from_pretrained(base))
    assert exported.stub().verify(exported.folder).passed
    assert exported.stub(plain_model(base)).verify(exported.folder).verdict == AS_BASE

    def forget(tensors: dict[str, Tensor], _config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(".bias")]:
            tensors[name].zero_()

    result = exported.stub(exported.changed(tmp_path / "changed", forget)).verify(exported.folder)
    assert (result.verdict, result.nearest) == (IN_PART, "without its biases")

    monkeypatch.setattr("windlass.export.probe.FLOAT32_SHARE", 0.0)
    lines: list[str] = []
    record = export(tmp_path / "adapter", tmp_path / "none", base=str(base), say=lines.append)
    assert record["probe"] is None
    assert "biases were trained" in lines[-1]
    with refused("no-probe", PROBE) as problems:
        exported.stub(nn.Identity()).verify(tmp_path / "none")
    assert "biases were trained" in problems[0].hint
