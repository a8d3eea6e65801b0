"""Validating rows: each bad one is reported with its place, what was expected, and what to change."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.batch import Message
from plait.data.row_files import RawRow
from plait.errors import ConfigError, Violation
from plait.rewards.answer import ANSWER_RULES, ANSWER_TYPES, AnswerOptions, gold_problem
from plait.rewards.builtin import ROW_VERIFIERS

REQUIRED_FIELDS = ("prompt", "answer")
OPTIONAL_FIELDS = ("messages", "answer_rule", "answer_type", "verifier", "id")
KNOWN_FIELDS = REQUIRED_FIELDS + OPTIONAL_FIELDS
EXPECTED_FIELDS = (
    '"prompt" (text, or a list of {role, content}; or that list as "messages"), "answer", and optionally '
    '"answer_rule", "answer_type", "verifier" and "id"'
)
ANSWER_FIELDS = ("chosen", "rejected")
"""What a row of preferences has besides: a better and a worse answer, both text."""
ROLES = ("system", "user", "assistant")
GOLD_FREE = "format"

LoadVerifier = Callable[[str], object]
"""Raises ConfigError for a verifier that does not exist."""


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A row that can be used. prefix: content of a last message by the assistant, which it is to continue."""

    where: str
    row_id: str
    messages: tuple[Message, ...]
    prefix: str
    answer: Any
    verifier: str
    payload: dict[str, Any]
    preference: tuple[str, str] | None = None


class RowChecker:
    """Checks rows of one task, remembering which ids and verifiers were seen.

    verifier: the task's, for rows that name none. has_preferences: each row has a chosen and a rejected answer.
    is_graded: answers will be judged, so that what a verifier needs must be there.
    """

    def __init__(
        self, verifier: str, load_verifier: LoadVerifier, *, has_preferences: bool = False, is_graded: bool = True
    ):
        self._verifier = verifier
        self._has_preferences, self._is_graded = has_preferences, is_graded
        self._known_fields = KNOWN_FIELDS + (ANSWER_FIELDS if has_preferences else ())
        self._load = load_verifier
        self._verifier_problems: dict[str, Violation | None] = {}
        self.violations: list[Violation] = []
        self.unread_fields: set[str] = set()
        self._ids: dict[str, str] = {}

    def start_file(self) -> None:
        """Ids must differ within a file; training and evaluation files are numbered apart."""
        self._ids = {}

    def check(self, row: RawRow) -> CheckedRow | None:
        """The row, or None after adding to `violations` everything that is wrong with it."""
        before = len(self.violations)
        if row.fields is None:
            self._bad(row, None, str(row.problem), "Each line must be one JSON object; correct or remove it")
            return None
        fields = row.fields
        messages, prefix = self._messages(row, fields)
        verifier = self._row_verifier(row, fields)
        if verifier is not None:
            self._check_answer(row, fields, verifier)
        preference = self._preference(row, fields) if self._has_preferences else None
        row_id = self._row_id(row, fields)
        if len(self.violations) > before:
            return None
        assert verifier is not None, "a row without a verifier has a violation"
        read = {"prompt", "messages", "answer", "verifier", "id", *(ANSWER_FIELDS if self._has_preferences else ())}
        payload = {k: v for k, v in fields.items() if k not in read}
        self.unread_fields.update(k for k in fields if k not in self._known_fields)
        answer = fields.get("answer")
        return CheckedRow(row.where, row_id, messages, prefix, answer, verifier, payload, preference)

    def _preference(self, row: RawRow, fields: dict[str, Any]) -> tuple[str, str] | None:
        """The two answers, or None after reporting what is wrong with them."""
        texts = []
        for field in ANSWER_FIELDS:
            if field not in fields:
                self._missing(row, fields, field)
            elif not isinstance(fields[field], str):
                what = "null" if fields[field] is None else f"a {type(fields[field]).__name__}"
                self._bad(row, field, f"is {what}, not text", "Give the answer's text, as the assistant writes it")
            elif self._is_text(row, field, fields[field]):
                texts.append(fields[field])
        if len(texts) < 2:
            return None
        if texts[0] == texts[1]:
            self._bad(row, "rejected", 'is the same text as "chosen"', "Remove the row: there is nothing to prefer")
            return None
        return texts[0], texts[1]

    def _bad(self, row: RawRow, field: str | None, rule: str, change: str) -> None:
        where = row.where if field is None else f'{row.where}, field "{field}"'
        self.violations.append(Violation(where, rule, change))

    def _missing(self, row: RawRow, fields: dict[str, Any], field: str) -> None:
        others = [name for name in fields if name not in self._known_fields]
        close = difflib.get_close_matches(field, others, n=1)
        hint = f'Rename "{close[0]}" to "{field}". ' if close else ""
        found = ", ".join(f'"{name}"' for name in list(fields)[:10]) or "no field"
        besides = ', and "chosen" and "rejected"' if self._has_preferences else ""
        change = f"{hint}Found {found}; expected {EXPECTED_FIELDS}{besides}"
        self._bad(row, None, f'the field "{field}" is missing', change)

    def _messages(self, row: RawRow, fields: dict[str, Any]) -> tuple[tuple[Message, ...], str]:
        given = [name for name in ("prompt", "messages") if name in fields and fields[name] is not None]
        if len(given) == 2:
            self._bad(row, "messages", 'is given beside "prompt"', "Keep one of them")
            return (), ""
        if not given:
            null = next((name for name in ("prompt", "messages") if name in fields), None)
            if null is None:
                self._missing(row, fields, "prompt")
            else:
                self._bad(row, null, "is null", "Give the question's text, or a list of {role, content}")
            return (), ""
        name, value = given[0], fields[given[0]]
        if isinstance(value, str) and name == "prompt":
            if self._is_text(row, name, value):
                return (Message("user", value),), ""
            return (), ""
        if isinstance(value, list):
            return self._chat(row, name, value)
        change = "Give the question's text, or a list of {role, content}"
        expected = "text or a list of messages" if name == "prompt" else "a list of messages"
        self._bad(row, name, f"is a {type(value).__name__}; expected {expected}", change)
        return (), ""

    def _is_text(self, row: RawRow, field: str, value: str) -> bool:
        """Whether a text can be used: not blank, and encodable (JSON can spell half a surrogate pair)."""
        if not value.strip():
            self._bad(row, field, "is empty", "Give its text, or remove the row")
            return False
        try:
            value.encode()
        except UnicodeEncodeError as error:
            rule = f"holds half of a surrogate pair ({value[error.start]!a}) at character {error.start + 1}"
            self._bad(row, field, rule, "Write the whole character, or remove it")
            return False
        return True

    def _chat(self, row: RawRow, field: str, items: list[Any]) -> tuple[tuple[Message, ...], str]:
        messages = [m for i, item in enumerate(items) if (m := self._message(row, f"{field}[{i}]", i, item))]
        if len(messages) < len(items):
            return (), ""
        prefix = ""
        if messages and messages[-1].role == "assistant":
            prefix = messages.pop().content
        if all(message.role != "user" for message in messages):
            rule = "has no message of the user" + (" before the assistant's" if prefix else "")
            self._bad(row, field, rule, 'Put the question in {"role": "user", "content": ...}')
            return (), ""
        return tuple(messages), prefix

    def _message(self, row: RawRow, field: str, position: int, item: Any) -> Message | None:
        if not isinstance(item, dict):
            rule = f"is a {type(item).__name__}; expected an object with role and content"
            self._bad(row, field, rule, 'Write {"role": "user", "content": "..."}')
            return None
        given = {key: value for key, value in item.items() if value is not None}
        unknown = sorted(set(given) - {"role", "content"})
        missing = [key for key in ("role", "content") if key not in given]
        if missing or unknown:
            rule = " and ".join([f'lacks "{key}"' for key in missing] + [f'has "{key}"' for key in unknown])
            self._bad(row, field, rule, "A message has a role and a content, both text, and nothing else")
            return None
        role, content = given["role"], given["content"]
        if role not in ROLES:
            shown = repr(role) if isinstance(role, str) else f"a {type(role).__name__}"
            self._bad(row, f"{field}.role", f"is {shown}", f"Use one of {', '.join(ROLES)}")
            return None
        if role == "system" and position > 0:
            self._bad(row, f"{field}.role", "is system, but not the first message", "Put it first")
            return None
        if not isinstance(content, str):
            self._bad(row, f"{field}.content", f"is a {type(content).__name__}, not text", "Give one text")
            return None
        return Message(role, content) if self._is_text(row, f"{field}.content", content) else None

    def _row_verifier(self, row: RawRow, fields: dict[str, Any]) -> str | None:
        """The row's verifier, or the task's; None if there is no such verifier."""
        if "verifier" not in fields or fields["verifier"] is None:
            return self._verifier
        name = fields["verifier"]
        if not isinstance(name, str):
            change = f"Use one of {', '.join(ROW_VERIFIERS)}, or a module:function"
            self._bad(row, "verifier", f"is a {type(name).__name__}, not a name", change)
            return None
        if name not in self._verifier_problems:
            self._verifier_problems[name] = self._load_problem(name)
        problem = self._verifier_problems[name]
        if problem is None:
            return name
        self._bad(row, "verifier", f'"{name}": {problem.rule}', problem.change)
        return None

    def _load_problem(self, name: str) -> Violation | None:
        try:
            self._load(name)
        except ConfigError as error:
            return error.violations[0]
        return None

    def _check_answer(self, row: RawRow, fields: dict[str, Any], verifier: str) -> None:
        needs_gold = self._is_graded and verifier in ROW_VERIFIERS and verifier != GOLD_FREE
        options = self._options(row, fields)
        if "answer" not in fields:
            if needs_gold:
                self._missing(row, fields, "answer")
            return
        answer = fields["answer"]
        if answer is None:
            if needs_gold:
                self._bad(row, "answer", "is null", "Give the answer, or remove the row: it cannot be graded")
            return
        if isinstance(answer, str) and not self._is_text(row, "answer", answer):
            return
        if options is None or not needs_gold:
            return
        problem = gold_problem(verifier, answer, options)
        if problem is not None:
            change = (
                'An answer is text, a number, or a list of those with "answer_rule"; "answer_type" says how to read it'
            )
            self._bad(row, "answer", problem, change)
        for item in answer if isinstance(answer, list) else ():
            if isinstance(item, str) and problem is None:
                self._is_text(row, "answer", item)

    def _options(self, row: RawRow, fields: dict[str, Any]) -> AnswerOptions | None:
        """The row's answer options, or None after reporting one that does not exist."""
        values: dict[str, Any] = {}
        for field, known in (("answer_type", ANSWER_TYPES), ("answer_rule", ANSWER_RULES)):
            if field not in fields or fields[field] is None:
                continue
            value = fields[field]
            if not isinstance(value, str) or value not in known:
                shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
                self._bad(row, field, f"is {shown}", f"Use one of {', '.join(known)}")
                return None
            values[field] = value
        return AnswerOptions(**values)

    def _row_id(self, row: RawRow, fields: dict[str, Any]) -> str:
        if "id" not in fields or fields["id"] is None:
            row_id = str(row.index)
        elif isinstance(fields["id"], bool) or not isinstance(fields["id"], str | int):
            kind = type(fields["id"]).__name__
            self._bad(row, "id", f"is a {kind}", "Give text or a whole number, or leave it out")
            return ""
        else:
            row_id = str(fields["id"])
            if not self._is_text(row, "id", row_id):
                return ""
        if row_id in self._ids:
            rule = f'"{row_id}" is also the id of {self._ids[row_id]}'
            change = "Ids must differ; a row without one has its number as id. Change one, or leave out all"
            self._bad(row, "id", rule, change)
        else:
            self._ids[row_id] = row.where
        return row_id
