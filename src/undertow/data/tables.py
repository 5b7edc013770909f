"""Hugging Face datasets on disk: what `save_to_disk` wrote, or .parquet and .arrow files, read by pyarrow alone.

    data/dataset_dict.json  data/train/data-00000-of-00001.arrow  data/test/...     a dataset with its own parts
    data/state.json  data/data-00000-of-00001.arrow                                 without: split 80 to 20, by class
    data/train-00000-of-00002.parquet  data/test-00000-of-00001.parquet             as on the hub; or one file

No code of a dataset is run, nothing is unpickled, and images are read from the tables alone, never from paths in them.
Arrow files are mapped into memory. A parquet file says the size that it unpacks to, which is checked first. An .arrow
file whose buffers are compressed is refused after its first batch: `datasets` writes none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undertow.data.sizes import check_claim, file_bytes
from undertow.errors import CallError, DataError

SUFFIXES = (".parquet", ".arrow")
PARTS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
DICT_FILE, STATE_FILE = "dataset_dict.json", "state.json"
MAX_JSON_BYTES = 64 << 20
METADATA_KEY = b"huggingface"


def is_table_folder(folder: Path) -> bool:
    """Whether the folder is what `save_to_disk` wrote, or has files of tables."""
    return any((folder / name).is_file() for name in (DICT_FILE, STATE_FILE)) or bool(_files(folder))


def import_pyarrow() -> Any:
    """The module; raises CallError that says how to install it."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise CallError(
            "tables of Hugging Face datasets need pyarrow, which is not installed: pip install 'undertow[data]'"
        ) from None
    return pyarrow


def read_parts(path: Path) -> dict[str, Any]:
    """The tables of a dataset: `train` or `whole`, and `validation` and `test` where there are such parts."""
    import_pyarrow()
    if path.is_file():
        return {"whole": read_table([path])}
    if (path / DICT_FILE).is_file():
        names = _read_json(path / DICT_FILE).get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"{path / DICT_FILE} does not name the parts of a dataset")
        return _name_parts(str(path), {name: _list_saved(path / _check_name(name, path)) for name in names})
    if (path / STATE_FILE).is_file():
        return {"whole": read_table(_list_saved(path))}
    found: dict[str, list[Path]] = {}
    for file in _files(path):
        found.setdefault(file.name.partition("-")[0].partition(".")[0], []).append(file)
    if len(found) == 1 and "train" not in found:
        return {"whole": read_table(next(iter(found.values())))}
    return _name_parts(str(path), found)


def _name_parts(what: str, found: dict[str, list[Path]]) -> dict[str, Any]:
    """The tables under the names that are used here."""
    chosen = {part: next((found[name] for name in names if name in found), None) for part, names in PARTS.items()}
    if chosen["train"] is None:
        raise DataError(f"{what} has the parts {', '.join(found) or '(none)'}; one must be train")
    if chosen["validation"] is None and chosen["test"] is None:
        return {"whole": read_table(chosen["train"])}
    return {part: read_table(files) for part, files in chosen.items() if files is not None}


def _check_name(name: str, folder: Path) -> str:
    if Path(name).name != name:
        raise DataError(f"{folder} is refused: it names {name!r}, which is not in it")
    return name


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())


def _list_saved(folder: Path) -> list[Path]:
    """The files that the state of a saved dataset names."""
    state = _read_json(folder / STATE_FILE)
    try:
        names = [item["filename"] for item in state["_data_files"]]
    except (KeyError, TypeError):
        raise DataError(f"{folder / STATE_FILE} does not name the files of a dataset") from None
    return [folder / _check_name(str(name), folder) for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    if file_bytes(path) > MAX_JSON_BYTES:
        raise DataError(f"{path} is larger than {MAX_JSON_BYTES:,} bytes")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} must hold an object")
    return found


def read_table(paths: Sequence[Path]) -> Any:
    """The files as one table."""
    arrow = import_pyarrow()
    try:
        tables = [_read_parquet(path) if path.suffix == ".parquet" else _read_arrow(path) for path in paths]
        table = arrow.concat_tables(tables)
        table.validate(full=True)
    except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{', '.join(map(str, paths[:1]))} cannot be read as a table: {reason[:200]}") from None
    if not len(table):
        raise DataError(f"{paths[0].parent} has no examples")
    return table


def _read_parquet(path: Path) -> Any:
    arrow = import_pyarrow()
    file_bytes(path)
    with arrow.parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        check_claim(str(path), sum(group.total_byte_size for group in groups))
        return file.read()


def _read_arrow(path: Path) -> Any:
    arrow = import_pyarrow()
    file_bytes(path)
    with arrow.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        count = range(reader.num_record_batches) if is_file else None
        batches = (reader.get_batch(index) for index in count) if count is not None else reader
        found = []
        before = arrow.total_allocated_bytes()
        for batch in batches:
            found.append(batch)
            if arrow.total_allocated_bytes() - before > file_bytes(path):
                raise DataError(f"{path} holds compressed buffers, which are not read: save it as parquet instead")
        return arrow.Table.from_batches(found, reader.schema)


def class_names(table: Any, column: str) -> tuple[str, ...] | None:
    """The names of a ClassLabel column, from the metadata that `datasets` writes; None without any."""
    try:
        features = json.loads(table.schema.metadata[METADATA_KEY])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tuple(map(str, names)) if isinstance(names, list) else None
