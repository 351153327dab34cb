"""From settings to models: all that a server has, one loaded at the start or several that wait for requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field

from jaxllm.chat.formats import detect_formats
from jaxllm.config import ADAPTER_SIZES, ModelConfig, ServeConfig, make_config, part_of
from jaxllm.config.parts import LoRAModules
from jaxllm.config.server import FOR_SEVERAL_MODELS
from jaxllm.config.sources import read_mapping
from jaxllm.config.values import SERVED_NAME, NameList, comma_separated, format_bytes, is_pattern, is_served_name
from jaxllm.engine.messages import MemoryRoom
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.folders import in_home
from jaxllm.serving.dialects.candle_vllm import is_candle_vllm, read_candle_vllm
from jaxllm.serving.pooling.inputs import score_method
from jaxllm.serving.served_model import LoadableModel, read_chat_template
from jaxllm.serving.state import Registry
from jaxllm.weights.folder import gguf_models, is_saved, whole_name
from jaxllm.weights.source import check_name
from jaxllm.wording import did_you_mean

if TYPE_CHECKING:
    from jaxllm.engine.doors.async_llm import AsyncLLM

PLACE = ("multi_process", "num_processes", "process_id", "coordinator_address", "cluster", "cluster_secret")
CALLED_HERE = {"lora_modules": "adapters here", "served_model_name": "name here, and aliases"}
MODELS = "models"
"""The key of a list of entries; without it the file's keys are the models' names."""


class CatalogEntry(ModelConfig):
    """A model that a server may load: any setting of a model, and how the server treats it."""

    name: str
    """What requests and listings call it."""
    aliases: NameList = ()
    """Other names that requests may use; one with a * stands for all that match it."""
    preload: bool = False
    """Load it before the server is ready."""
    pinned: bool = False
    """Once it is loaded it stays."""
    hidden: bool = False
    """Serve it without listing it."""
    ttl: Annotated[float, Field(gt=0)] | None = None
    """Seconds without a request after which it is unloaded; null is never. By default model_ttl."""
    adapters: LoRAModules | None = None
    """Its LoRA adapters: names with their paths, or a list of objects with name and path."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([self.name, *self.aliases]))

    @property
    def of_model(self) -> ModelConfig:
        """The model's own part, with its names and with a process for its engine."""
        changed = {"served_model_name": ",".join(self.names), "engine_process": True, "lora_modules": self.adapters}
        return part_of(self, ModelConfig).model_copy(update=changed)


def read_catalog(config: ServeConfig) -> list[CatalogEntry]:
    """Every model of a server, the default one first; none where the server has only MODEL. Raises ConfigError."""
    if not config.has_catalog:
        for name in FOR_SEVERAL_MODELS:
            if name in config.model_fields_set:
                raise ConfigError(f"{name} is for servers of several models: it needs models or model_directory")
        return []
    if config.num_engines > 1:
        number = config.data_parallel_size
        raise ConfigError(f"data_parallel_size is {number}: several engines are for a server of one model")
    if config.in_group:
        raise ConfigError(f"num_processes is {config.num_processes}: several processes are for a server of one model")
    if config.multi_process:
        raise ConfigError("multi_process is true: several processes are for a server of one model")
    if config.engine_process is False:
        raise ConfigError("engine_process is False: with several models each engine has a process of its own")
    given = {name: getattr(config, name) for name in ModelConfig.model_fields if name in config.model_fields_set}
    if config.lora_modules:
        raise ConfigError("lora_modules is for servers of one model; models in a file have theirs as adapters")
    model, names = given.pop("model", None), given.pop("served_model_name", None)
    if names is not None and model is None:
        raise ConfigError("served_model_name is the name of MODEL, which is missing; models have theirs in the file")
    defaults = given | {"ttl": config.model_ttl}
    found = []
    if config.models is not None:
        found += list(_in_file(config.models, defaults))
    if config.model_directory is not None:
        found += list(_in_directory(config.model_directory, defaults))
    if model is not None:
        default = next((place for place, entry in found if model in entry.names and names is None), None)
        if default is None:
            called = sorted(comma_separated(names), key=is_pattern)  # the sort is stable
            name, *aliases = called if called and not is_pattern(called[0]) else [model, *called]
            found.append(("MODEL", _entry("MODEL", {"name": name, "aliases": aliases, "model": model}, defaults)))
        found.sort(key=lambda one: one[0] != (default or "MODEL"))  # the sort is stable: the others keep their order
    if not found:
        place = config.models or config.model_directory
        raise ConfigError(f"there is no model to serve in {place}: give a MODEL, or put one there")
    for name in comma_separated(config.preload_model):
        at = next((at for at, (_, entry) in enumerate(found) if {name, Path(name).stem} & {*entry.names}), None)
        if at is None:
            names = ", ".join(entry.name for _, entry in found)
            raise ConfigError(f"preload_model is {name!r}, and the models are {names}")
        found[at] = found[at][0], found[at][1].model_copy(update={"preload": True})
    return _checked(found, config.most_loaded_models)


class ServerModels:
    """The models of a server. Raises ConfigError for settings that are wrong whatever a model's files hold."""

    def __init__(self, config: ServeConfig):
        catalog = read_catalog(config)
        self._config = config
        self._are_several = bool(catalog)
        self._found: list[tuple[str, Path]] = []
        self._models = [self._loadable(entry) for entry in catalog]
        if not catalog:
            only = config.of_model.model_copy(update={"engine_process": config.engine_process is not False})
            start = partial(_start_engine, asks_for_room=False)  # with a question it would be planned twice
            self._models.append(LoadableModel(only, start, preload=True, pinned=True))
        for model in self._models:
            self._check(model)

    def _loadable(self, entry: CatalogEntry) -> LoadableModel:
        return LoadableModel(
            entry.of_model, _start_engine, preload=entry.preload, pinned=entry.pinned, hidden=entry.hidden,
            ttl=entry.ttl, budget=self._config.model_memory,
        )  # fmt: skip

    def _check(self, model: LoadableModel) -> None:
        with self._naming(model):
            check_name(model.config.model)
            read_chat_template(model.config)
            detect_formats(None, model.config.tool_call_parser, model.config.reasoning_parser)

    @property
    def names(self) -> list[str]:
        """The names of all models that are listed."""
        return [name for model in self._models if not model.hidden for name in model.names]

    def start(self) -> Registry:
        """Load what is loaded at the start, one after the other. Raises what keeps one from loading."""
        for model in self._models:
            if model.awaited:
                with self._naming(model):
                    model.load(partial(self._check_memory, model))
        return Registry(
            self._models,
            any_name=self._config.serve_any_model_name,
            max_loaded=self._config.most_loaded_models if self._are_several else None,
            memory=self._config.model_memory,
            min_seconds=self._config.model_min_seconds,
            look=list if self._config.model_directory is None else partial(self._look, self._config.model_directory),
        )

    def _look(self, folder: Path) -> list[LoadableModel]:
        """The models that are in the folder now. Raises ConfigError, where it has changed, as the start would."""
        found, before, known = _models_in(folder), self._found, {model.config.model for model in self._models}
        self._found, paths = found, {str(path) for _, path in found}
        for entry in read_catalog(self._config) if found != before and paths - known else ():
            if entry.model in paths - known:
                self._check(model := self._loadable(entry))
                self._models.append(model)
        return [model for model in self._models if model.config.model in paths]

    def shutdown(self) -> None:
        """Stop the engines of all that is loaded, when the server has ended."""
        for model in self._models:
            if model.served is not None:
                model.served.engine.shutdown()

    def _check_memory(self, model: LoadableModel, nbytes: int | None) -> None:
        """Raises ConfigError where a model does not fit beside those that were loaded before it at the start."""
        most, others = self._config.model_memory, sum(one.planned_bytes or 0 for one in self._models if one.served)
        if most is not None and others + (nbytes or 0) > most:
            raise ConfigError(
                f"it takes {format_bytes(nbytes or 0)} of memory, and those preloaded before it "
                f"{format_bytes(others)}; model_memory is {format_bytes(most)}: raise it, or preload fewer"
            )

    @contextmanager
    def _naming(self, model: LoadableModel) -> Iterator[None]:
        """Errors name the model where there are several."""
        try:
            yield
        except JaxLLMError as error:
            if not self._are_several:
                raise
            raise ConfigError(f"model {model.name!r}: {error}") from None


def _in_file(path: Path, defaults: Mapping[str, Any]) -> Iterator[tuple[str, CatalogEntry]]:
    document = read_mapping(path, "--models", "names to models, or hold a list of models")
    if is_candle_vllm(document):
        yield from ((where, _entry(where, fields, defaults)) for where, fields in read_candle_vllm(path, document))
        return
    entries = document.get(MODELS, document)
    if others := [key for key in document if key != MODELS and MODELS in document]:
        raise ConfigError(f"{path}: unknown key {others[0]!r} beside {MODELS!r}")
    if isinstance(entries, dict):
        entries = [(f"model {name!r}", {"name": name}, fields) for name, fields in entries.items()]
    elif isinstance(entries, list):
        entries = [(f"{MODELS}[{number}]", {}, fields) for number, fields in enumerate(entries)]
    else:
        raise ConfigError(f"{path}: {MODELS} is {entries!r}; it must be a list of models, or names with their models")
    for place, named, fields in entries:
        where = f"{path}: {place}"
        if not isinstance(fields, dict):
            raise ConfigError(f"{where} is {fields!r}; it must be a mapping of setting: value")
        if twice := named.keys() & fields.keys():
            raise ConfigError(f"{where}: {twice.pop()} is set again; the key is the name")
        entry = named | fields
        for key in entry:
            if key in CALLED_HERE:
                raise ConfigError(f"{where}: {key} is called {CALLED_HERE[key]}")
            if key in PLACE:
                raise ConfigError(f"{where}: {key} is for a server of one model")
            if key not in CatalogEntry.model_fields:
                near = did_you_mean(str(key), CatalogEntry.model_fields)
                raise ConfigError(f"{where}: unknown setting {key!r}{near}")
        for required in ("name", "model"):
            if entry.get(required) is None:
                raise ConfigError(f"{where}: {required} is missing")
        yield where, _entry(where, entry, defaults)


def _in_directory(folder: Path, defaults: Mapping[str, Any]) -> Iterator[tuple[str, CatalogEntry]]:
    for name, path in _models_in(folder):
        yield str(path), _entry(str(path), {"name": name, "model": str(path)}, defaults)


def _models_in(folder: Path) -> list[tuple[str, Path]]:
    """The models that lie in a folder, by name, and not those in folders below its own."""
    try:
        folders = [path for path in folder.iterdir() if (path / "config.json").is_file() or is_saved(path)]
        named = [(path.name, path) for path in folders]
        named += [(whole_name(path).stem, path) for path in gguf_models(folder)]
    except OSError as error:
        raise ConfigError(f"model_directory is {str(folder)!r}: {(error.strerror or str(error)).lower()}") from None
    return sorted(named)


def _entry(where: str, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> CatalogEntry:
    settings = {**defaults, **_expanded(fields)}
    if not (settings.get("enable_lora") or settings.get("adapters")):  # those of all models are for others
        settings = {name: settings[name] for name in settings if name not in ADAPTER_SIZES or name in fields}
    try:
        entry: CatalogEntry = make_config(CatalogEntry, **settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if entry.num_engines > 1:
        raise ConfigError(f"{where}: data_parallel_size is {entry.data_parallel_size}; it is for servers of one model")
    if is_pattern(entry.name):
        raise ConfigError(f"{where}: name is {entry.name!r}, which stands for other names; it may be among the aliases")
    for name in entry.names:
        if not is_served_name(name):
            raise ConfigError(f"{where}: {name!r} is no name: it must be {SERVED_NAME}")
    return entry


def _expanded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with home directories in place of ~ where a setting is a path, the model's own too."""
    paths = {name for name, field in ModelConfig.model_fields.items() if Path in get_args(field.annotation)}
    return {
        name: str(in_home(value)) if isinstance(value, str) and (name in paths or value[:2] == "~/") else value
        for name, value in fields.items()
    }


def _checked(found: list[tuple[str, CatalogEntry]], max_loaded: int | None) -> list[CatalogEntry]:
    places: dict[str, str] = {}
    for where, entry in found:
        for name in entry.names:
            if name in places:
                raise ConfigError(f"{where}: the name {name!r} is taken by {places[name]}")
            places[name] = where
    entries = [entry for _, entry in found]
    if max_loaded is None:
        return entries
    preloaded = sum(entry.preload for entry in entries)
    if preloaded > max_loaded:
        raise ConfigError(f"models to preload are {preloaded}; max_loaded_models is {max_loaded} and must be as many")
    pinned = sum(entry.pinned for entry in entries)
    if pinned >= max_loaded and len(entries) > pinned:
        problem = f"max_loaded_models is {max_loaded} and must be more: the others need room"
        raise ConfigError(f"pinned models are {pinned}; {problem}")
    return entries


def _start_engine(
    config: ModelConfig, given_up: threading.Event, room: MemoryRoom, *, asks_for_room: bool = True
) -> AsyncLLM:
    from jaxllm.engine.doors.async_llm import AsyncLLM  # takes a second, in which probes are answered

    engine = AsyncLLM(config, given_up=given_up, room=room if asks_for_room else None)
    try:
        score_method(config, engine.info.tasks)
    except BaseException:
        engine.shutdown()
        raise
    return engine
