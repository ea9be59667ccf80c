"""Chat templates: by name, windlass's own, the tokenizer's, in files; what their Jinja reads, and looks for."""

from __future__ import annotations

import ctypes
import difflib
import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.messages import KEYS
from windlass.errors import UserError, Where
from windlass.runfile.rows import is_template

if TYPE_CHECKING:
    from jinja2 import nodes

TEMPLATES = Path(__file__).parent / "templates"
CONTROL = re.compile(r"<\|[a-z_]+\|>|\[/?[A-Z_]+\]")  # how templates write control tokens
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
# Methods and filters whose result has a text, or equals it, only if the content has it.
KEEPING = re.compile(
    "[lr]?strip|r?split|startswith|endswith|replace|lower|upper|title|capitalize|trim|first|last|string|safe|escape|"
    "default|tojson|join|indent"
)
OF_MAPPINGS = ("get", "items", "dictsort")  # which a text doesn't have
TESTS = re.compile("defined|undefined|none|string|mapping|iterable|sequence|number|boolean|true|false")


def require_tokens(name: str, tokenizer: Any, place: str) -> None:
    """Refuse a fallback whose control tokens would be spelt out: the model knows none of them."""
    vocabulary = tokenizer.get_vocab()
    absent = {other: {*CONTROL.findall(read_template(other))} - {*vocabulary} for other in (name, "chatml", "llama3")}
    if absent[name]:
        fitting = next((other for other, tokens in absent.items() if not tokens), "alpaca")
        problem = (
            f"the tokenizer has no chat template, and no {', '.join(sorted(absent[name]))} for {name.capitalize()}'s"
        )
        hint = f"set data.chat_template: {fitting}, or the template that the model was trained with"
        raise UserError(problem, place, hint, "no-chat-template")


def read_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def find_template(asked: str, own: Any, place: str) -> tuple[str, str]:
    """Find a template by name, in the tokenizer or here; or take the template itself, or a file."""
    names = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    if isinstance(own, dict) and asked in own:
        return own[asked], f"the tokenizer's chat template {asked!r}"
    if asked in names:
        return read_template(asked), f"the chat template {asked!r}"
    if is_template(asked):
        return asked, "data.chat_template"
    try:
        text = Path(asked).expanduser().read_text(encoding="utf-8")
        return (json.loads(text)["chat_template"] if asked.endswith(".json") else text), asked
    except OSError as error:
        close = difflib.get_close_matches(asked, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"write one of {', '.join(names)}, a file, or the template"
        raise UserError(f"no chat template {asked!r}: {error.strerror}", place, hint, "no-such-template") from None
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{asked} is not a chat template: {error}"
        raise UserError(problem, place, "name a .jinja file", "not-a-template") from None


def parse_template(template: str) -> nodes.Template:
    from jinja2 import Environment

    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))


def read_variables(template: str) -> list[str]:
    """Return the variables that the template reads and doesn't set itself."""
    from jinja2 import meta

    return sorted(meta.find_undeclared_variables(parse_template(template)))


def list_searched(template: str) -> list[str] | None:
    """Return the texts, in lower case, that a template looks for in contents, and may cut them at.

    None if what it writes may depend on more, such as a content's length or whether another one is equal."""
    from jinja2 import nodes

    tree = [*parse_template(template).find_all(nodes.Node)]
    macros = {node.name: node.args for node in tree if isinstance(node, nodes.Macro)}
    carriers = {"content"}  # names and keys of contents, and of what is made of them
    texts: set[Any] = set()
    measured: set[int] = set()  # what is compared with nothing, which no content is

    def carries(node: nodes.Node) -> bool:
        match node:
            case nodes.Const(value=value):
                return bool(value == "content")
            case nodes.Name(name=name):
                return name in carriers
            case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=str(name))) if (
                name in carriers or not KEEPING.fullmatch(name)
            ):
                return name in carriers
            case nodes.Compare() | nodes.Test() | nodes.Not() | nodes.Dict() | nodes.Filter(name="dictsort"):
                return False
        return any(map(carries, node.iter_child_nodes(exclude=("test",))))

    def list_bound(node: nodes.Node) -> set[Any]:
        """Return the names that a content is given here."""
        target = getattr(node, "target", getattr(node, "key", None))
        value = getattr(node, "iter", getattr(node, "value", getattr(node, "node", node)))
        bound = [(target, value)] if target else []
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
            bound = [*zip(macros.get(node.node.name, ()), node.args, strict=False)]
        names = [name for name, value in bound if carries(value)]
        names += [inner for name in names if isinstance(name, nodes.Tuple) for inner in name.items]
        return {getattr(name, "attr", getattr(name, "name", getattr(name, "value", name))) for name in names}

    def weighs(node: nodes.Node) -> bool:
        match node:
            case nodes.Compare(expr=left, ops=operands):
                sides = [left, *(operand.expr for operand in operands)]
                fixed = {side.value for side in sides if isinstance(side, nodes.Const)}
                others = [side for side in sides if not isinstance(side, nodes.Const) and carries(side)]
                if not others or fixed & {"", None, 0}:
                    measured.update(map(id, others))
                    return False
                texts.update(fixed)
                operators = {operand.op for operand in operands}
                searched = operators <= {"eq", "ne"} or (operators <= {"in", "notin"} and isinstance(left, nodes.Const))
                built = any(isinstance(side, nodes.Add | nodes.Concat) for side in others)
                return built or not (searched and fixed and all(str(text).strip() for text in fixed))
            case (
                nodes.Filter(node=nodes.Node() as owner, name=name, args=arguments)
                | nodes.Call(node=nodes.Getattr(node=owner, attr=name), args=arguments)
            ) if name not in OF_MAPPINGS and any(map(carries, (owner, *arguments))):
                fixed = {argument.value for argument in arguments if isinstance(argument, nodes.Const)}
                texts.update(fixed)
                known = KEEPING.fullmatch(name) or (name in ("length", "count") and id(node) in measured)
                return not known or not all(isinstance(argument, nodes.Const) for argument in arguments)
            case nodes.Test(name=name, node=value):
                return not TESTS.fullmatch(name) and carries(value)
            case nodes.Getitem(node=value, arg=nodes.Slice()):
                return carries(value)
        return isinstance(node, nodes.With)

    found = {*carriers}
    while found:
        carriers |= found
        found = set().union(*map(list_bound, tree)) - carriers
    weighed = [*map(weighs, tree)]
    texts -= {*KEYS}  # of parts, if a content has some
    return None if any(weighed) else sorted({text.lower() for text in texts if isinstance(text, str) and text.strip()})


def require_variables(template: str, kwargs: Mapping[str, Any], where: Where) -> None:
    """Refuse variables that the template doesn't read: they would silently have no effect."""
    from jinja2 import TemplateError

    try:
        known = read_variables(template)
    except TemplateError as error:
        hint = "fix its Jinja, or name another data.chat_template"
        raise UserError(f"not a chat template: {error}", where("data.chat_template"), hint, "template-syntax") from None
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"remove it; the template uses {', '.join(known)}"
            problem = f"the chat template doesn't use a variable {name!r}"
            raise UserError(problem, where("data.template_kwargs"), hint, "unused-variable")


def run_within(seconds: float, work: Callable[[], Any]) -> Any:
    """Run what may never end, such as somebody else's template, in a thread that is ended after so many seconds, with
    TimeoutError."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also the SystemExit that ends it
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return future.result(seconds)
    except TimeoutError:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise
