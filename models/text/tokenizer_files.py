"""What the folder of a Hugging Face checkpoint says of its tokenizer, in the spellings of transformers 4 and 5.

1. tokenizer.json is the tokenizer itself; tokenizer_config.json (and, before 2023, special_tokens_map.json) says which of its
   tokens are specials and by which names a chat template knows them.
2. The chat template is a file of its own, or an entry of tokenizer_config.json; a second one may be there for tools.
3. Which ids end an answer is in generation_config.json, or else in config.json.

ValueError names the file that is not what it should be; FileNotFoundError the one that is missing.
"""

import dataclasses
import json
import os
import pathlib

import tokenizers

from models import hub

# What tokenizer_config.json calls its specials, and a template by the same name.
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclasses.dataclass(frozen=True)
class Folder:
    model: tokenizers.Tokenizer
    named: dict[str, str]  # of NAMES -> the token's text; "eos_token" is among them
    template: str | None
    tool_template: str | None  # where there are tools, if that is another
    stops: list[int]  # ids


def read(path: str | os.PathLike) -> Folder:
    """`path` may be a hub id: then its files are downloaded first."""
    directory = pathlib.Path(path)
    if not directory.is_dir() and hub.is_id(path):
        directory = hub.folder(path, hub.TOKENIZER)
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {' and '.join(missing)}; point at the folder of a downloaded checkpoint that has "
            f"tokenizer.json and tokenizer_config.json, or use 'byte_chatml', which needs no files"
        )
    config = _read_json(directory / "tokenizer_config.json")
    if (older := directory / "special_tokens_map.json").is_file():
        config = _read_json(older) | {key: value for key, value in config.items() if value is not None}
    named = {key: text for key in NAMES if (text := _token_text(config.get(key))) is not None}
    if "eos_token" not in named:
        raise ValueError(f"{directory}/tokenizer_config.json names no eos_token; add the token that ends a turn")
    template, tool_template = _templates(directory, config)
    return Folder(_read_model(directory / "tokenizer.json"), named, template, tool_template, _stops(directory))


def _read_model(path: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer.json: {error}; fetch it again") from error


def _templates(directory: pathlib.Path, config: dict) -> tuple[str | None, str | None]:
    """(the chat template, the one where there are tools if that is another)."""
    found = config.get("chat_template")
    if isinstance(found, list):  # the older form: named templates
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{directory}/tokenizer_config.json: an entry of chat_template lacks {error}") from error
    named = dict(found) if isinstance(found, dict) else {"default": found}
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        named[path.stem] = path.read_text("utf-8")
    if (file := directory / "chat_template.jinja").is_file():
        named["default"] = file.read_text("utf-8")
    return named.get("default"), named.get("tool_use")


def _stops(directory: pathlib.Path) -> list[int]:
    """The ids that end an answer, as transformers knows them: of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            stops = _read_json(path).get("eos_token_id")
            stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
            if any(type(id) is not int or id < 0 for id in stops):
                raise ValueError(f"{path} has eos_token_id {stops}; it must be a token id or a list of them")
            return stops
    return []


def _token_text(token: str | dict | None) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: pathlib.Path) -> dict:
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object; fetch it again")
    return value
