"""Reads the tokenizer's files in the folder of a Hugging Face checkpoint, as transformers 4 and 5 write them.

1. tokenizer.json is the tokenizer itself. tokenizer_config.json (and, before 2023, special_tokens_map.json) lists its special
   tokens, and the names by which a chat template refers to them.
2. The chat template is a file of its own, or an entry of tokenizer_config.json. There may be a second one for tools.
3. `copy` copies these files for another checkpoint of the same model, byte for byte.
4. The IDs that end a completion are in generation_config.json, or else in config.json.
"""

import os
import pathlib
import shutil

import tokenizers

from models import hub
from models.text import gguf_tokenizer
from sharding.system import atomic_file
from sharding.weights.format import gguf_header

# Names of special tokens in tokenizer_config.json and in chat templates.
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
MAX_ID = 2**24  # of a token
FILES = ("*token*.json", "vocab.json", "merges.txt", "tokenizer.model", "*.jinja", "additional_chat_templates/*.jinja")
FILES = (*FILES, "generation_config.json")


def read(path: str | os.PathLike) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None, str | None, list[int]]:
    """Reads the tokenizer files of a checkpoint's folder, or its GGUF file, or downloads those of a hub ID first.

    Returns (the tokenizer, {one of NAMES: the token's text} with "eos_token" among them, the chat template, the template that
    replaces it when there are tools, the IDs that end a completion); None for a template that the checkpoint lacks. Raises
    FileNotFoundError for a missing file, and ValueError for a malformed one. Both name the file.
    """
    if gguf_header.is_gguf(path):
        return gguf_tokenizer.read(path)
    directory = pathlib.Path(path)
    if not directory.is_dir() and (hub.is_id(path) or hub.is_url(path)):
        directory = hub.folder(path, hub.TOKENIZER)
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"tokenizer folder {directory} lacks {' and '.join(missing)}; download the checkpoint's tokenizer.json and "
            f"tokenizer_config.json, or use the tokenizer 'byte_chatml', which needs no files"
        )
    config = atomic_file.read_json(directory / "tokenizer_config.json", dict)
    if (older := directory / "special_tokens_map.json").is_file():
        config = atomic_file.read_json(older, dict) | {key: value for key, value in config.items() if value is not None}
    named = {key: text for key in NAMES if (text := _token_text(config.get(key))) is not None}
    if "eos_token" not in named:
        raise ValueError(f"{directory}/tokenizer_config.json lacks eos_token; add the token that ends a turn")
    template, tool_template = _templates(directory, config)
    model = _read_model(directory / "tokenizer.json")
    return model, named, template, tool_template, _stop_ids(directory)


def copy(folder: pathlib.Path, out: pathlib.Path) -> None:
    """Copies the tokenizer's files and generation_config.json of one checkpoint's folder to another's; existing files stay."""
    for pattern in FILES:
        for file in folder.glob(pattern):
            target = out / file.relative_to(folder)
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)


def _read_model(path: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        model = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises nothing narrower, and a panic of it is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{path} is not a tokenizer: {error}; download it again") from error
    last = max(model.get_vocab(with_added_tokens=True).values(), default=0)
    if last > MAX_ID:  # some functions of the library count up to it
        raise ValueError(f"{path} has a token with ID {last}, above {MAX_ID}; download it again")
    return model


def _templates(directory: pathlib.Path, config: dict) -> tuple[str | None, str | None]:
    """Returns (the chat template, the template to use with tools); None for each that the checkpoint lacks."""
    found = config.get("chat_template")
    if isinstance(found, list):  # the older form: named templates
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (KeyError, TypeError) as error:
            file = directory / "tokenizer_config.json"
            raise ValueError(f"{file}: an entry of chat_template lacks {error}; download it again") from error
    named = dict(found) if isinstance(found, dict) else {"default": found}
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        named[path.stem] = _text(path)
    if (file := directory / "chat_template.jinja").is_file():
        named["default"] = _text(file)
    if bad := [name for name, text in named.items() if not isinstance(text, str | None)]:
        raise ValueError(f"{directory}: chat template {bad[0]!r} is not a text; download it again")
    return named.get("default"), named.get("tool_use")


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text: {error}; download it again") from None


def _stop_ids(directory: pathlib.Path) -> list[int]:
    """Returns the token IDs that end a completion, from the same files as the transformers library."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            stops = atomic_file.read_json(path, dict).get("eos_token_id")
            stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
            if any(type(id) is not int or id < 0 for id in stops):
                raise ValueError(f"{path} has eos_token_id {stops}; make it a token ID or a list of token IDs")
            return stops
    return []


def _token_text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
