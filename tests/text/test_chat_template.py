"""The process that renders chat templates: how it ends, what it is not told, and that only chats wait for it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pageferry.core.errors import FailedPreconditionError
from pageferry.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
CONTENT = "{{ messages[0].content }}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BOMB = "{% if messages[0].content == 'bomb' %}" + LOOP + "{% endif %}"


def pid_of(template: ChatTemplate) -> int:
    assert template.problem == ""
    assert template._process is not None
    return template._process.pid


def test_a_process_that_was_killed_is_started_anew() -> None:
    template = ChatTemplate(CONTENT, {})
    first = pid_of(template)
    os.kill(first, signal.SIGKILL)
    assert template.render(USER) == "Hi"
    assert pid_of(template) != first


def test_one_chat_that_takes_too_long_fails_alone() -> None:
    template = ChatTemplate(BOMB + CONTENT, {})
    with pytest.raises(FailedPreconditionError, match="more processor time or memory than a template may") as caught:
        template.render([{"role": "user", "content": "bomb"}])
    assert caught.value.reason == "CHAT_TEMPLATE_FAILED"
    assert template.render(USER) == "Hi"


async def test_a_slow_chat_does_not_hold_up_the_event_loop() -> None:
    template = ChatTemplate(BOMB + CONTENT, {})
    pid = pid_of(template)
    os.kill(pid, signal.SIGSTOP)
    rendering = asyncio.create_task(template.render_async(USER))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not rendering.done()
    os.kill(pid, signal.SIGCONT)
    assert await rendering == "Hi"


def test_the_process_knows_nothing_of_the_routers_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFERRY_ROUTER_SALT_KEY", "secret")
    template = ChatTemplate(CONTENT, {})
    process = Path(f"/proc/{pid_of(template)}")
    assert b"secret" not in (process / "environ").read_bytes()


def test_the_process_can_open_nothing() -> None:
    template = ChatTemplate(CONTENT, {})
    process = Path(f"/proc/{pid_of(template)}")
    limits = {line[:26].strip(): line[26:].split()[:2] for line in (process / "limits").read_text().splitlines()}
    assert limits["Max open files"] == limits["Max file size"] == limits["Max core file size"] == ["0", "0"]
    assert int(limits["Max address space"][0]) <= 2**30
    assert len(list((process / "fd").iterdir())) == 4  # three of /dev/null, and the socket


def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate(CONTENT, {})
    pid = pid_of(template)
    del template
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_template_that_cannot_be_compiled_in_time_is_a_problem_of_each_chat() -> None:
    template = ChatTemplate("{{ " + "10**" * 30 + "10 }}" + "{{ 'x' * 10**9 }}" * 3, {})
    with pytest.raises(FailedPreconditionError):
        template.render(USER)
