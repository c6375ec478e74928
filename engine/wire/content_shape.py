"""Which shape of content a chat template wants: one text, or a list of parts.

A template that loops over the content of its messages wants parts. The loops are found as vLLM
finds them (0.33, `renderers/hf.py`), for a template that is judged otherwise gets other text.
"""

from __future__ import annotations

from jinja2 import nodes


def loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template in `tree` iterates over the content of a message."""
    messages = _names_of(tree, {"messages"})
    one = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _is_name(loop.iter, messages)
    }
    message = _names_of(tree, one)
    inside: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        given = _parameters_given_content(tree, macro, message)
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                return True
    return any(
        _is_content(loop.iter, message)
        or (_is_plain(loop.iter, "content") and id(loop) not in inside)
        for loop in tree.find_all(nodes.For)
    )


def _names_of(tree: nodes.Template, names: set[str]) -> set[str]:
    """`names`, and those that are assigned one of them, or a slice or filtering of it."""
    known = set(names)
    assignments = list(tree.find_all(nodes.Assign))
    grew = True
    while grew:
        grew = False
        for assignment in assignments:
            target = assignment.target
            if not isinstance(target, nodes.Name) or target.name in known:
                continue
            if _is_name(assignment.node, known):
                known.add(target.name)
                grew = True
    return known


def _parameters_given_content(
    tree: nodes.Template, macro: nodes.Macro, message: set[str]
) -> set[str]:
    """The parameters of `macro` that some call passes a message's content for."""
    names = [argument.name for argument in macro.args]
    given = set()
    for call in tree.find_all(nodes.Call):
        if not _is_plain(call.node, macro.name):
            continue
        passed = zip(names, call.args, strict=False)
        named = ((keyword.key, keyword.value) for keyword in call.kwargs)
        given |= {name for name, value in (*passed, *named) if _is_content(value, message)}
    return given


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """What filters, tests and slices are applied to."""
    while True:
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if isinstance(node, nodes.Filter | nodes.Test) or sliced:
            node = node.node  # type: ignore[union-attr]
        else:
            return node


def _is_name(node: nodes.Node | None, names: set[str]) -> bool:
    node = _unwrapped(node)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _is_plain(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_content(node: nodes.Node | None, message: set[str]) -> bool:
    """`message.content` or `message['content']`, perhaps filtered or sliced."""
    node = _unwrapped(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _is_name(node.node, message)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == "content" and _is_name(node.node, message)
    return False
