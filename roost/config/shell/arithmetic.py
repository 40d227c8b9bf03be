"""Shell arithmetic on whole numbers; nothing is evaluated but numbers, names and operators."""

from __future__ import annotations

import ast
import keyword
import operator
import re
import warnings
from collections.abc import Callable

MAX_EXPRESSION = 2000  # characters
MAX_SHIFT = 62
_BITS = 64  # the numbers of bash
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARISONS: dict[type[ast.AST], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.+))\s*$", re.DOTALL)


class NotKnown(ValueError):
    """The result depends on something that is not known."""


def evaluate(expression: str, number_of: Callable[[str], int]) -> int:
    """The value of an expression; `number_of` gives that of a variable, or raises NotKnown.

    >>> evaluate("(4 + x) / 2 > 3 && 1", {"x": 5}.__getitem__)
    1
    """
    if len(expression) > MAX_EXPRESSION:
        raise NotKnown("the expression is too long")
    choice = _ternary(expression)
    if choice is not None:
        condition, one, other = choice
        return evaluate(one if evaluate(condition, number_of) else other, number_of)
    if any(keyword.iskeyword(name) for name in re.findall(r"[A-Za-z_]\w*", expression)):
        raise NotKnown(f"{expression.strip()} cannot be computed")  # these words mean something else to Python
    python = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", r"\1", expression)
    python = python.replace("&&", " and ").replace("||", " or ")
    python = re.sub(r"!(?!=)", " not ", python).replace("/", "//")
    python = re.sub(r"\b0+(\d)", r"\1", python)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # Python's advice about a text that is no Python
            tree = ast.parse(python.strip() or "0", mode="eval")
        return _limited(_number(tree.body, number_of))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError) as error:
        raise NotKnown(f"{expression.strip()} cannot be computed") from error


def _limited(number: int) -> int:
    if number.bit_length() > _BITS:
        raise NotKnown("the number is too large")
    return int(number)


def _number(node: ast.AST, number_of: Callable[[str], int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return number_of(node.id)
    if isinstance(node, ast.UnaryOp):
        value = _number(node.operand, number_of)
        if isinstance(node.op, ast.Not):
            return int(not value)
        return {ast.USub: -value, ast.UAdd: value, ast.Invert: ~value}[type(node.op)]
    if isinstance(node, ast.BoolOp):
        values = (_number(part, number_of) != 0 for part in node.values)
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _number(node.left, number_of), _number(node.comparators[0], number_of)
        return int(_COMPARISONS[type(node.ops[0])](left, right))
    if isinstance(node, ast.BinOp):
        return _limited(_binary(node.op, _number(node.left, number_of), _number(node.right, number_of)))
    raise NotKnown("the expression has an operator that is not known")


def _binary(kind: ast.operator, left: int, right: int) -> int:
    if isinstance(kind, ast.FloorDiv):  # bash rounds towards zero
        return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    if isinstance(kind, ast.Mod):
        return abs(left) % abs(right) * (1 if left >= 0 else -1)
    if isinstance(kind, ast.Pow | ast.LShift | ast.RShift):
        if not 0 <= right <= MAX_SHIFT:
            raise NotKnown("the number is too large")
        return int(
            {ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift}[type(kind)](left, right)
        )
    if type(kind) not in _OPERATORS:
        raise NotKnown("the expression has an operator that is not known")
    return _OPERATORS[type(kind)](left, right)


def _ternary(expression: str) -> tuple[str, str, str] | None:
    """The parts of `condition ? one : other` outside parentheses."""
    depth, question, nested = 0, None, 0
    for at, character in enumerate(expression):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and character == "?":
            if question is None:
                question = at
            else:
                nested += 1
        elif depth == 0 and character == ":" and question is not None:
            if nested == 0:
                return expression[:question], expression[question + 1 : at], expression[at + 1 :]
            nested -= 1
    return None
