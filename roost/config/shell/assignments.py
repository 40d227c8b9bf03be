"""Assignments of a script: to variables, to elements of arrays, and to whole arrays."""

from __future__ import annotations

from dataclasses import replace

from roost.config.shell.arithmetic import NotKnown
from roost.config.shell.builtins import Builtins
from roost.config.shell.expand import TooMuch
from roost.config.shell.state import State
from roost.config.shell.syntax import Assignment, Literal, Word
from roost.config.shell.values import Unknown, Value, elements, of_unknown, text_value


class Assignments(Builtins):
    """Sets variables as a script assigns them."""

    def _assign(self, assignment: Assignment, state: State) -> None:
        name = assignment.name
        if state.exports_all:
            state.exported = state.exported.union((name,))
        if isinstance(assignment.value, Word):
            value = self._given(name, self.expander.one(assignment.value, state), assignment)
            if name in state.integers:
                value = self._computed(assignment, state)
            if assignment.index is not None:
                key = self.expander.key(name, assignment.index, state)
                array = dict(state.array(name))
                if key is None:  # any element may be this one
                    array = {"0": elements(name, assignment.position)}
                elif assignment.appends and key in array:
                    array[key] = Value((*array[key].parts, *value.parts), value.position)
                else:
                    array[key] = value
                state.variables[name] = state.in_order(name, array)
                return
            old = state.scalar(name)
            if assignment.appends and name in state.integers:
                state.variables[name] = value
            elif assignment.appends and isinstance(state.variables.get(name), dict):
                array = state.array(name)
                state.variables[name] = {
                    **array,
                    "0": Value((*array.get("0", Value()).parts, *value.parts), value.position),
                }
            elif assignment.appends and old is not None:
                parts = (*old.parts, *value.parts)
                if sum(len(part) for part in parts if isinstance(part, str)) > 100_000:
                    raise TooMuch("a value is too long")
                state.variables[name] = Value(parts, old.position)
            else:
                state.variables[name] = value
            return
        array = dict(state.array(name)) if assignment.appends else {}
        following = max((int(key) for key in array if key.isdecimal()), default=-1) + 1
        for key_word, word in assignment.value:
            if key_word is not None:
                key = self.expander.key(name, key_word, state)
                value = self.expander.one(word, state)
                if key is None:
                    key, value = str(following), elements(name, assignment.position)
                array[key] = value
                following = int(key) + 1 if key.isdecimal() else following
                continue
            values = self.expander.words(word, state)
            unset = self.expander.one(word, state).unknown if not values else None
            last = str(following - 1)
            if unset is not None and unset.is_unset and last in array:
                array[last] = replace(array[last], dropped=unset)  # it may be a flag
            for value in values:
                array[str(following)] = value
                following += 1
        if len(array) > 20_000:
            raise TooMuch("an array is too long")
        state.variables[name] = state.in_order(name, array)

    def _given(self, name: str, value: Value, assignment: Assignment) -> Value:
        """A value whose command the caller answered by setting the variable, or with the variable to set."""
        unknown = value.unknown
        if unknown is None or value.tested is not None:
            return value
        if name in self.environ:
            self.reading.given[name] = (unknown, self.environ[name])
            return text_value(self.environ[name], assignment.position)
        if len(value.parts) == 1 and not unknown.is_unset:
            return Value((replace(unknown, variable=unknown.variable or name),), value.position)
        return value

    def _computed(self, assignment: Assignment, state: State) -> Value:
        """The value of a variable that `declare -i` made a number."""
        word = assignment.value
        if isinstance(word, Word) and assignment.appends:
            word = replace(word, parts=(Literal(f"{assignment.name} + ("), *word.parts, Literal(")")))
        try:
            if not isinstance(word, Word) or assignment.index is not None:
                raise NotKnown(assignment.name)
            return text_value(str(self.expander.number(word, state)), assignment.position)
        except NotKnown:
            reason = "it is computed from what is not known"
            return of_unknown(Unknown(f"${assignment.name}", reason, assignment.position, assignment.name))
