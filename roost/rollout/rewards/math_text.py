"""Answers in mathematical text as RLinf's `math` reward reads them: extraction, cleaning and comparison.

Plain Python without other modules of Roost: the process that compares answers loads it by its path. Expressions are
parsed by a grammar and never evaluated as Python, as answers come from a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

TOLERANCE = 1e-4  # relative
Same = Callable[[str, str], bool]  # compares two expressions symbolically


# Extraction ---------------------------------------------------------------------------------------------------------


def extracted(text: str) -> str | None:
    r"""The answer in a text, by the first of RLinf's markers that it has; None if it has none.

    >>> extracted(r"\boxed{1}, so \boxed{\frac12}"), extracted("The answer is 4."), extracted("it is 4")
    ('\\frac12', ' 4.', None)
    """
    begin, end = text.find("final answer is $"), text.find("$. I hope")
    if 0 <= begin < end:
        return text[begin + len("final answer is $") : end]
    if "boxed" in text:
        return _boxed(text.rpartition("boxed")[2])
    for marker in ("he answer is", "final answer is"):
        if marker in text:
            return text.rpartition(marker)[2]
    _, marker, after = text.partition("答案是")
    return after.strip().partition("\n\n")[0] if marker else None


def _boxed(after: str) -> str:
    """Boxed text: up to the closing brace, or up to the next dollar sign if it has no braces."""
    if not after.startswith("{"):
        return after.partition("$")[0].strip()
    depth = 0
    for place, letter in enumerate(after):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return after[1:place]
    return after[1:]


# Cleaning -----------------------------------------------------------------------------------------------------------

UNITS = re.split(
    r"\s+",
    """
east degree degrees mph kmph km/h kmh ft foot feet inch inches yard yards mile miles meter meters metre metres cm mm
km dm lb lbs pound pounds ounce ounces oz gram grams kg kilogram kilograms mg ton tons liter liters litre litres ml
gallon gallons quart quarts pint pints cup cups second seconds sec secs minute minutes min mins hour hours hr hrs
day days week weeks month months year years yr yrs am pm cent cents dollar dollars dime dimes nickel nickels penny
pennies euro euros rupee rupees rs point points unit units square cubic sq person people student students boy boys
girl girls man men woman women child children apple apples orange oranges book books ball balls card cards coin
coins piece pieces box boxes page pages line lines edge edges side sides time times way ways number numbers percent
percentage radian radians rad newton newtons joule joules watt watts volt volts ampere amperes ohm ohms hertz pascal
kelvin celsius fahrenheit gm sqm m^2 cm^2 km^2 m^3 cm^3
""".strip(),
)
UNIT = re.compile(r"(^|[\s\d}])(?:" + "|".join(map(re.escape, sorted(UNITS, key=len, reverse=True))) + r")($|\W)", re.I)
SMALL = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
WORDS = {word: str(number) for number, word in enumerate(f"{SMALL} seventeen eighteen nineteen twenty".split())}
NAMED = re.compile(r"^(?:[a-zA-Z]{1,2}|\\?[a-zA-Z]+_\{?\w\}?)\s*(?:=|\\in)\s*(?=\S)")
FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")
FRACTION_HALF = re.compile(r"\\frac\s*(\d)\s*\{")
SQRT = re.compile(r"\\sqrt\s*([^\s{\[\\])")
SLASHED = re.compile(r"^(-?\d+)/(-?\d+)$")


def cleaned(text: str) -> str:
    r"""Remove parts of an answer that do not change its value: units, dollar signs, spaces, "x =" and the like.

    >>> [cleaned(text) for text in (r"x = \dfrac12 \text{ cm}", "$1,000.00$ dollars.", "1/2", "ten", "50\\%")]
    ['\\frac{1}{2}', '1,000', '\\frac{1}{2}', '10', '50']
    """
    text = text.strip().replace("\n", "").rstrip(".").replace("\\!", "").replace("\\ ", " ")
    text = re.sub(r"\\begin\{(?:array\}\{.*?|bmatrix|array)\}", r"\\begin{pmatrix}", text)
    text = re.sub(r"\\end\{(?:bmatrix|array)\}", r"\\end{pmatrix}", text)
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = re.sub(r"(?<=\S)\s*\\(?:text|mbox)\{.*?\}$", "", text).strip()
    for _ in range(2):
        text = UNIT.sub(r"\1\2", text).strip()
    text = re.sub(r"\^\{?\\circ\}?|°", "", text).replace("\\$", "").replace("$", "")
    text = re.sub(r"\\(?:text|mbox|mathrm|mathbf|textbf)\{(.*?)\}", r"\1", text)
    text = text.replace("\\(", "").replace("\\)", "")
    text = re.sub(r"\\?%", "", text).replace("~", " ").strip()
    text = WORDS.get(text.lower(), text)
    text = re.sub(r"\band\b|(?<=\d)\s*\\?,\s*(?=\d{3}\b(?!,?\d?\)))", lambda one: "" if one[0] == "and" else ",", text)
    text = NAMED.sub("", text.strip())
    text = text.replace("infinity", "\\infty").replace("+\\inity", "\\infty").replace("**", "^")
    if "j" in text and "i" not in text:
        text = text.replace("j", "i")
    text = re.sub(r"(\d+)\.0+(?=$|[^\d])", r"\1", text)
    text = re.sub(r"(?<![\d\w])\.(?=\d)", "0.", text)
    text = re.sub(r"\bsqrt\s*\(?([\w]+)\)?", r"\\sqrt{\1}", text) if "\\sqrt" not in text else text
    text = SQRT.sub(r"\\sqrt{\1}", text.replace(" ", ""))
    text = FRACTION_HALF.sub(r"\\frac{\1}{", FRACTION.sub(r"\\frac{\1}{\2}", text))
    text = SLASHED.sub(r"\\frac{\1}{\2}", text)
    return text.rstrip(".")


# Comparison ---------------------------------------------------------------------------------------------------------


def as_float(text: str) -> float | None:
    """
    >>> as_float("1,000"), as_float("50%"), as_float("x")
    (1000.0, 0.5, None)
    """
    plain = text.replace(",", "")
    is_percent = plain.endswith("%")
    try:
        return float(plain.removesuffix("%").removesuffix("\\")) / (100 if is_percent else 1)
    except ValueError:
        return None


def same_plainly(answer: str, right: str) -> bool | None:
    """Compare two cleaned answers without algebra; None if algebra has to decide.

    >>> same_plainly("50", "0.5"), same_plainly("(B)", "B"), same_plainly("3", "4"), same_plainly("x+1", "1+x")
    (True, True, False, None)
    """
    if answer.strip().lower() == right.strip().lower():
        return True
    if right in ("A", "B", "C", "D", "E"):
        letters: list[str] = re.findall(r"\b[A-E]\b", answer.upper().strip(".: ()"))
        if letters and letters[-1] == right:
            return True
    one, other = as_float(answer), as_float(right)
    if one is not None and other is not None:
        return any(abs(one - wanted) <= TOLERANCE * abs(wanted) for wanted in (other / 100, other, other * 100))
    if not answer:
        return False
    return True if _unbracketed(answer) == _unbracketed(right) else None


def _unbracketed(text: str) -> str:
    return re.sub(r"[{}()\[\]]", "", text).lower()


def same(answer: str, right: str, is_same: Same) -> bool:
    """Return True if two cleaned answers are equal; `is_same` compares by algebra."""
    plainly = same_plainly(answer, right)
    if plainly is not None:
        return plainly
    parts, right_parts = _elements(answer), _elements(right)
    if parts and right_parts and len(parts) == len(right_parts):
        pairs = zip(parts, right_parts, strict=True)
        if all(same(one, other, is_same) for one, other in pairs):
            return True
    if answer.count("=") == right.count("=") == 1:
        one, other = (f"{left}-({after})" for left, _, after in (text.partition("=") for text in (answer, right)))
        return is_same(one, other) or is_same(f"-({one})", other)
    for text, against in ((answer, right), (right, answer)):
        name, is_equation, value = text.partition("=")
        if is_equation and "=" not in against and len(name.strip()) <= 2:
            return same(value, against, is_same)
    return is_same(answer, right)


MATRIX = re.compile(r"^\\begin\{pmatrix\}(.*)\\end\{pmatrix\}$")


def _elements(text: str) -> list[str] | None:
    r"""Elements of a tuple, an interval or a matrix.

    >>> _elements("(1,2]"), _elements("x"), _elements(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}")
    (['1', '2'], None, ['1', '2', '3', '4'])
    """
    matrix = MATRIX.match(text)
    if matrix:
        rows = [row for row in matrix[1].split("\\\\") if row]
        return [cell.strip() for row in rows for cell in row.split("&")]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]":
        return [part.strip() for part in text[1:-1].split(",")]
    return None


def symbolic(answer: str, right: str) -> bool:
    """Return True if two expressions are equal by algebra or within the tolerance; False on an error."""
    from latex2sympy2_extended import latex2sympy  # type: ignore[import-untyped]
    from sympy import N, simplify  # type: ignore[import-untyped]

    try:
        one, other = latex2sympy(answer), latex2sympy(right)
    except Exception:  # parsers raise anything on malformed LaTeX; a policy writes much of it
        return False
    checks: tuple[Callable[[], Any], ...] = (
        lambda: one == other,
        lambda: one.equals(other),
        lambda: simplify(one - other) == 0,
        lambda: abs(float(N(one)) - float(N(other))) <= TOLERANCE * abs(float(N(other))),
    )
    for check in checks:
        try:
            if check():
                return True
        except Exception:  # algebra that does not apply to these types
            continue
    return False


def is_right(answer: str, right: list[str]) -> bool:
    """Return True if an extracted and cleaned answer equals one of the correct ones."""
    return any(same(answer, one, symbolic) for one in right)
