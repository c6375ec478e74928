"""Makes protobuf message classes from a table, without generated code.

The descriptors are in a pool of their own, so that another library in the process (`tritonclient`)
can have the same messages. The module needs the extra `grpc`, so only code that serves or calls
gRPC imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto


def message_classes(
    package: str, table: Mapping[str, str], one_of: Mapping[str, str] = MappingProxyType({})
) -> Mapping[str, Any]:
    """Return the protobuf messages of `table` as classes, by name; `A.B` is declared within `A`.
    The fields of a message are written as `TYPE NAME=NUMBER, ...`; fields without numbers are
    numbered from 1 in order. `repeated X` is a list, `map X` is a map with text keys, and `.X` is a
    type that is declared within the message. `one_of` names, for a message, the fields of which at
    most one is set: either all its fields, or those listed after the name of the choice.
    """
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_File(package, table, one_of).made().SerializeToString())
    return MappingProxyType(
        {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
            for name in table
        }
    )


class _File:
    """Builds a protobuf file descriptor from a table. Lifetime: while the descriptor is built."""

    def __init__(self, package: str, table: Mapping[str, str], one_of: Mapping[str, str]) -> None:
        self._package = package
        self._table = table
        self._one_of = one_of

    def made(self) -> Any:
        """Return the finished file descriptor."""
        file = descriptor_pb2.FileDescriptorProto(
            name=f"warmroute/{self._package}.proto", package=self._package, syntax="proto3"
        )
        found: dict[str, Any] = {"": file}
        for path, fields in self._table.items():
            outer, _, name = path.rpartition(".")
            among = file.message_type if not outer else found[outer].nested_type
            message = found[path] = among.add(name=name)
            if path in self._one_of:
                message.oneof_decl.add(name=self._one_of[path].split()[0])
            for at, field in enumerate(filter(None, fields.split(", ")), 1):
                text, _, number = field.partition("=")
                self._add_field(message, path, int(number or at), text)
        return file

    def _add_field(self, message: Any, path: str, number: int, text: str) -> None:
        *words, name = text.split()
        field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
        if words[0] in ("repeated", "map"):
            field.label = _FIELD.LABEL_REPEATED
        if words[0] == "map":
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            for at, one in enumerate(("string key", f"{words[1]} value"), 1):
                self._add_field(entry, "", at, one)
            self._set_type(field, f"{path}.{entry.name}")
        else:
            within = words[-1].startswith(".")
            self._set_type(field, f"{path}{words[-1]}" if within else words[-1])
        if path in self._one_of:
            among = self._one_of[path].split()[1:]
            if not among or name in among:
                field.oneof_index = 0

    def _set_type(self, field: Any, kind: str) -> None:
        if kind in self._table or "." in kind:
            field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{self._package}.{kind}"
        else:
            field.type = getattr(_FIELD, f"TYPE_{kind.upper()}")
