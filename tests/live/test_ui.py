"""Tests of the page at `/ui` in a real browser: what it shows, that it survives a lost router and
names that are HTML, and that it requests nothing from other hosts.

Screenshots are left in the test's folder (`--basetemp`) for people to look at.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.live.browser import CHROMIUM, Page, opened
from tests.live.stack import engine_arguments, running
from tests.live.ui_checks import BROKEN, CONTRASTS, INKS, NAMELESS, SIGHTS, contrast, distance
from tests.router.crowded import Crowd, crowd

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&"
ROWS = "document.querySelectorAll('#decision-rows tbody tr').length"


@asynccontextmanager
async def shown(one: Crowd, profile: Path, width: int, dark: bool = False) -> AsyncIterator[Page]:
    """Yield the page `/ui` of a router with fake workers, once the page shows figures."""
    async with opened(profile) as page:
        await page.screen(width, 900 if width > 600 else 740, dark)
        await page.go(f"{one.url}/ui")
        await page.until("document.querySelector('#main') && !main.hidden", "the page's figures")
        yield page


async def busy(one: Crowd, seconds: int = 20, requests: int = 20) -> None:
    """Send traffic to the router, and bring one worker into each state."""
    for _ in range(seconds):
        for n in range(requests):
            await one.send(f"session-{n % 9}", tenant=("red", "green", None)[n % 3])
        one.answer(0.3, fails=0.02)
        await one.second()
    one.state(1, "down")
    one.state(2, "draining")
    await one.second()


def inert(page: Page, one: Crowd) -> None:
    """Check that the page logged no error or warning and requested only the router's own port."""
    assert page.complaints == []
    strangers = [url for url in page.asked if not url.startswith((one.url, "data:"))]
    assert strangers == []


@pytest.mark.timeout(240)
async def test_a_thousand_workers_fit_on_the_page_and_are_readable(tmp_path: Path) -> None:
    async with crowd(1000, policy="warmset") as one:
        await busy(one, 6, 40)
        async with shown(one, tmp_path / "profile", 1280) as page:
            await page.until(f"{ROWS} > 10", "decisions")
            assert "1000 workers" in await page.text("#fleet-said")
            assert "1 down" in await page.text("#fleet-said")
            drawn = await page.run("document.querySelectorAll('*').length")
            assert drawn < 2_500  # a thousand workers are one canvas
            for width, height in ((1280, 900), (360, 740)):
                for dark in (False, True):
                    await page.screen(width, height, dark, still=True)
                    await page.until(f"innerWidth === {width}", "the window")
                    await readable(page, width)
                    colours = "dark" if dark else "light"
                    await page.picture(tmp_path / f"thousand-{width}-{colours}.png")
            inert(page, one)


async def readable(page: Page, width: int) -> None:
    """Check that the page fits the width, has enough contrast, and names every control."""
    wide = await page.run("document.documentElement.scrollWidth")
    assert wide <= width
    contrasts = await page.run(CONTRASTS)
    assert len(contrasts) > 100
    assert contrasts[0][0] >= 4.5, contrasts[:5]
    assert await page.run(NAMELESS) == []
    assert await page.run(BROKEN) == []
    inks = await page.run(INKS)
    for one, other in (("load", "kv"), ("load", "hits"), ("kv", "hits")):
        for sight in SIGHTS:
            assert distance(inks[one], inks[other], sight) > 15, (one, other, sight)
    for name in ("load", "kv", "hits", "edge", "mark"):
        for ground in ("cell", "panel"):
            assert contrast(inks[name], inks[ground]) >= 3.0, (name, ground)


async def test_names_with_html_are_shown_as_text(tmp_path: Path) -> None:
    async with crowd(2, policy="warmset") as one:
        one.join(models=("m", HOSTILE))
        member = one.router.fleet.members[2]
        member.trouble = HOSTILE
        for _ in range(6):
            await one.send(HOSTILE, tenant=HOSTILE)
        await one.second()
        async with shown(one, tmp_path / "profile", 1280) as page:
            await page.until(f"{ROWS} > 3", "decisions")
            await page.run("document.querySelector('#as-table').click()")
            await page.run("document.querySelectorAll('#table button')[2].click()")
            await page.until("document.querySelector('#detail dl')", "the worker's details")
            detail = await page.text("#detail")
            assert HOSTILE in detail
            assert HOSTILE[:30] in await page.text("#decision-rows")
            assert await page.run("document.querySelectorAll('img, script').length") == 1
            assert await page.run("document.querySelectorAll('[onerror]').length") == 0
            inert(page, one)
            # The purpose of the policy: even through a hole in the page no script runs and nothing
            # leaks.
            assert await page.run(attempt("document.body.innerHTML += '<b>'")) == "TypeError"
            script = "document.head.append(document.createElement('script'))"
            assert await page.run(attempt(f"{script}; document.scripts[0].text = '1'")) != "done"
            away = "fetch('http://127.0.0.1:9/').then(() => 'let out', () => 'kept in')"
            assert await page.run(away) == "kept in"
            assert any("Content Security Policy" in said for said in page.complaints)


def attempt(deed: str) -> str:
    """Return a JavaScript expression that runs `deed` and gives "done" or the error's name."""
    return f"(() => {{ try {{ {deed}; return 'done'; }} catch (e) {{ return e.name; }} }})()"


async def test_the_page_shows_why_hits_are_not_exact(tmp_path: Path) -> None:
    async with crowd(8) as one:
        await busy(one, 2, 4)
        async with shown(one, tmp_path / "profile", 1280) as page:
            await page.until("!document.querySelector('#exactness').hidden", "the reasons")
            reasons = await page.text("#exactness")
            assert "approximate hits. The engine publishes no KV events" in reasons
            assert "Worker 3: approximate hits. The router has no tokenizer" in reasons
            assert "For exact hits: --tokenizer DIR" in reasons
            assert "7 with approximate hits" in await page.text("#fleet-said")  # one is down
            await page.run("document.querySelector('#as-table').click()")
            await page.run("document.querySelectorAll('#table button')[3].click()")
            await page.until("document.querySelector('#detail dl')", "the worker's details")
            assert "Its expected hits are approximate." in await page.text("#detail")
            await page.picture(tmp_path / "exactness.png")
            inert(page, one)


async def test_the_keyboard_reaches_every_worker_and_opens_one(tmp_path: Path) -> None:
    async with crowd(30) as one:
        await busy(one, 3, 10)
        async with shown(one, tmp_path / "profile", 1280) as page:
            await page.run("document.querySelector('#cells').focus()")
            for key in ("ArrowRight", "ArrowRight", "End", "Home", "ArrowRight"):
                await page.press(key)
            assert "Worker 1, down" in await page.text("#said")
            await page.press("Enter")
            await page.until("document.activeElement.id === 'detail'", "the details' focus")
            assert "Worker 1" in await page.text("#detail-title")
            await page.until("document.querySelector('#detail dl')", "the details")
            await page.press("Escape")
            assert await page.run("document.querySelector('#detail').hidden")
            assert await page.run("document.activeElement.id") == "cells"
            inert(page, one)


async def test_a_full_pool_shows_no_error_and_a_dead_worker_no_hits(
    tmp_path: Path,
) -> None:
    async with crowd(3) as one:
        for _ in range(3):
            for n in range(12):
                await one.send(f"session-{n % 3}")
            one.answer()
            await one.second()
        core = one.router.dispatcher.core
        for _ in range(40):
            core.counters.rejected("hold_timeout")
        one.state(1, "down")
        await one.second()
        frame = (await one.ui_state())["frame"]
        assert [(share >= 0) for share in frame["workers"]["hits"]] == [True, False, True]
        async with shown(one, tmp_path / "profile", 1280) as page:
            sparks = "[...document.querySelectorAll('.spark')].map((one) => one.textContent)"
            await page.until(f"{sparks}.length === 7", "the curves")
            told = {}
            for line in await page.run(sparks):
                title, _, figures = line.partition(" peak ")
                told[title] = figures
            assert "refused" in told["Full pool"]
            assert not told["Full pool"].startswith("0/s")
            assert told["Errors by blame"].startswith("0/s")
            await page.run("document.querySelector('#as-table').click()")
            cells = "[...document.querySelectorAll('#table td[data-is=Hits]')]"
            hits = await page.run(f"{cells}.map((one) => one.textContent)")
            assert sorted(said.endswith("%") for said in hits) == [False, True, True]
            await page.run("document.querySelector('#as-table').click()")
            await page.picture(tmp_path / "full.png")
            inert(page, one)


async def test_selecting_a_trunk_highlights_the_workers_that_hold_it(tmp_path: Path) -> None:
    async with crowd(40, policy="warmset") as one:
        await busy(one, 6, 30)
        async with shown(one, tmp_path / "profile", 1280) as page:
            await page.until("document.querySelector('#trunk-rows tbody button')", "a trunk")
            box = await page.run(
                "(() => { const b = document.querySelector('#trunk-rows tbody tr')"
                ".getBoundingClientRect(); scrollBy(0, b.y - 500); return b.x; })()"
            )
            y = await page.run(
                "document.querySelector('#trunk-rows tbody tr').getBoundingClientRect().y"
            )
            assert "lit" not in await page.text("#fleet-said")
            assert await page.run("document.querySelector('#replicas').hidden")
            ui = one.router.admin.ui.problems
            ui.replicas = lambda: [{"name": "two@1", "silent_s": 0.25, "differs_in": ["policy"]}]
            await one.second()
            await page.until("!document.querySelector('#replicas').hidden", "the replicas")
            assert await page.text("#replica-rows tbody") == "two@1250\u00a0mspolicy"
            ui.replicas = list
            y = await page.run(
                "document.querySelector('#trunk-rows tbody tr').getBoundingClientRect().y"
            )
            await page.point(box + 300, y + 5)
            await page.until(
                "document.querySelector('#fleet-said').textContent.includes('lit: ')", "light"
            )
            await page.picture(tmp_path / "lit.png")
            copies = (await one.ui_state())["frame"]["trunks"]["rows"][0]["copies"]
            assert f"lit: {copies} hold" in await page.text("#fleet-said")
            await page.point(box + 300, 5)
            await page.until(
                "!document.querySelector('#fleet-said').textContent.includes('lit: ')", "dark"
            )


async def test_a_hidden_page_sends_no_requests(tmp_path: Path) -> None:
    async with crowd(2) as one, shown(one, tmp_path / "profile", 1280) as page:
        # A headless tab is never hidden, so the test says that it is.
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        turn = "document.dispatchEvent(new Event('visibilitychange'))"
        await page.run(hide % "true" + turn)
        await page.run("new Promise((done) => setTimeout(done, 1500))")  # for requests in flight
        asked = len(page.asked)
        await page.run("new Promise((done) => setTimeout(done, 2500))")
        assert len(page.asked) == asked
        await one.second()
        await page.run(hide % "false" + turn)
        await page.until("document.querySelector('#live').textContent === 'live'", "news")
        assert len(page.asked) > asked


async def test_decisions_can_be_filtered_and_paused(tmp_path: Path) -> None:
    async with crowd(3, policy="round_robin") as one:
        for n in range(12):
            await one.send(tenant=("red", "green")[n % 2])
        await one.second()
        async with shown(one, tmp_path / "profile", 1280) as page:
            await page.until(f"{ROWS} === 12", "all decisions")
            for box, value, rows in (("tenant", "RED", 6), ("tenant", "blue", 0)):
                await type_into(page, f"#of-{box}", value)
                assert await page.run(ROWS) == rows
            await type_into(page, "#of-tenant", "")
            await type_into(page, "#of-worker", "1")
            assert await page.run(ROWS) == 4
            await type_into(page, "#of-worker", "")
            await page.run("document.querySelector('#pause').click()")
            await one.send()
            await one.second()
            await page.until(
                "document.querySelector('#decisions-said').textContent.includes('1 decision s')",
                "the count of what comes meanwhile",
            )
            assert await page.run(ROWS) == 12
            await page.run("document.querySelector('#pause').click()")
            assert await page.run(ROWS) == 13
            for rows in (38, 58):  # so many that the first rows are no longer sent
                for _ in range(rows - await page.run(ROWS)):
                    await one.send()
                await one.second()
                await page.until(f"{ROWS} === {rows}", "the others")
            one.answer()
            await one.second()
            last = "document.querySelector('#decision-rows tbody tr:last-child').cells[8]"
            await page.until(f"{last}.textContent !== '–'", "its first token, which came late")


async def type_into(page: Page, selector: str, value: str) -> None:
    await page.run(
        f"(() => {{ const box = document.querySelector('{selector}'); box.value = '{value}';"
        " box.dispatchEvent(new Event('input')); })()"
    )


@pytest.mark.timeout(240)
async def test_a_killed_worker_is_shown_first_and_in_red_until_its_restart(
    tmp_path: Path,
) -> None:
    """The page shows a killed worker first and in red, and no longer after its restart; one of four
    real workers is killed.
    """
    async with (
        running(tmp_path, workers=4) as stack,
        opened(tmp_path / "profile") as page,
    ):
        await page.screen(1280, 900)
        await page.go(f"{stack.admin}/ui")
        title = "(document.querySelector('#problems-title')?.textContent ?? '')"
        await page.until(f"{title}.startsWith('Nothing is wrong: 4 of 4 workers')", "all well")
        box = "getComputedStyle(document.querySelector('#problems')).borderTopColor"
        green = await page.run(box)
        await page.picture(tmp_path / "well.png")
        lost = stack.workers[1]
        lost.process.kill()
        await lost.process.wait()
        await page.until(f"{title} === '1 thing is wrong'", "the loss to be said")
        assert await page.run(box) != green
        assert await page.run("document.title") == "(1) warmroute"
        first = "document.querySelector('main').firstElementChild.id"
        assert await page.run(first) == "problems"
        told = await page.text("#problem-rows")
        assert "Worker is down" in told
        assert "docs/operations.md: WarmrouteWorkerDown" in told
        assert lost.url in told
        await page.until(
            "document.querySelector('#problem-rows .since').textContent.includes('(since ')",
            "since when",
        )
        for width, dark in ((1280, False), (1280, True), (420, False), (420, True)):
            await page.screen(width, 900, dark, still=True)
            await page.until(f"innerWidth === {width}", "the window")
            await readable(page, width)
            await page.picture(tmp_path / f"wrong-{width}-{'dark' if dark else 'light'}.png")
        await page.run("document.querySelector('#problem-rows button').click()")
        await page.until("document.querySelector('#detail dl')", "the worker's details")
        assert "Worker 1: down" in await page.text("#detail-title")
        again = engine_arguments(port=lost.url.rpartition(":")[2])
        await stack.programs.start("again", "engine", again)
        await page.screen(1280, 900, still=True)
        await page.until(f"{title}.startsWith('Nothing is wrong: 4 of 4 workers')", "its return")
        assert await page.run(box) == green
        assert page.complaints == []


async def test_cells_show_a_workers_address_and_why_it_is_not_healthy(tmp_path: Path) -> None:
    """Each cell shows a worker's address and why it is not healthy with 64 workers; with 1,000 the
    block at the top does.
    """
    async with crowd(64) as one:
        await busy(one, 3, 30)
        ejected = one.router.dispatcher.core.workers.get(5)
        assert ejected is not None
        ejected.health.move("too many requests fail")
        await one.second()
        async with shown(one, tmp_path / "profile", 1280) as page:
            # The page does not expose text drawn into the canvas, so the test records it at the
            # pen.
            pen = "CanvasRenderingContext2D.prototype"
            await page.run(
                f"window.inked = new Set(); const real = {pen}.fillText;"
                f"{pen}.fillText = function (words, ...at) {{"
                " window.inked.add(words); return real.call(this, words, ...at); }; 0"
            )
            await one.second()
            for words in ("127.0.0.1:9", "127.0.0.64:9", "1  down", "5  ejected", "it failed"):
                await page.until(
                    f"[...window.inked].some((one) => one.includes({words!r}))", f"{words} drawn"
                )
            for width in (1280, 420):
                await page.screen(width, 900, still=True)
                await page.until(f"innerWidth === {width}", "the window")
                await readable(page, width)
                await page.picture(tmp_path / f"sixty-four-{width}.png")
            inert(page, one)


async def test_curves_have_axes_with_units_and_times(tmp_path: Path) -> None:
    async with crowd(3) as one:
        for _ in range(70):
            for n in range(3):
                await one.send(f"session-{n}")
            one.answer()
            await one.second()
        async with shown(one, tmp_path / "profile", 1280) as page:
            await page.until("document.querySelectorAll('.spark').length === 7", "the curves")
            for name in ("up", "along"):
                ends = await page.run(
                    f"[...document.querySelectorAll('.{name}')].map((axis) => "
                    "[...axis.children].map((one) => one.textContent))"
                )
                assert len(ends) == 7
                if name == "along":
                    assert set(map(tuple, ends)) == {("2\u00a0min ago", "now")}
                else:
                    assert all(low == "0" for _, low in ends)
                    units = [top.lstrip("0123456789.k") for top, _ in ends]
                    assert units[0] == "/s"
                    assert units[1].strip() in ("ms", "s")
                    assert units[2].strip() == "%"


@pytest.mark.timeout(240)
async def test_the_page_shows_that_its_router_is_lost_and_continues_with_a_new_one(
    tmp_path: Path,
) -> None:
    router = ["--policy", "warmset"]
    async with (
        running(tmp_path, workers=2, router=router) as stack,
        opened(tmp_path / "profile") as page,
    ):
        await page.screen(1280, 900)
        await page.go(f"{stack.admin}/ui")
        await page.until("document.querySelector('#main') && !main.hidden", "the page")
        for n in range(6):
            assert (await stack.complete([n] * 300))[0] == 200
        await page.until(f"{ROWS} === 6", "the decisions")
        assert await page.text("#live") == "live"
        port = stack.admin.rpartition(":")[2]
        stack.router.process.terminate()
        await stack.router.process.wait()
        await page.until("!document.querySelector('#banner').hidden", "the banner")
        assert "Connection lost: the router does not answer." in await page.text("#banner")
        assert await page.run("document.querySelector('main').classList.contains('old')")
        await page.picture(tmp_path / "lost.png")
        again = ["serve", "--port", "0", "--admin-port", port]
        again += ["--worker", stack.workers[0].url]
        await stack.programs.start("router-2", "router", again)
        await page.until("document.querySelector('#live').textContent === 'live'", "it again")
        await page.until(
            "document.querySelector('#fleet-said').textContent.startsWith('1 worker:')",
            "the new router's fleet",
        )
        assert await page.run("document.querySelector('#banner').hidden")
        assert await page.run(ROWS) == 0


async def test_pressing_the_doctor_button_shows_the_doctors_answer(tmp_path: Path) -> None:
    """The page shows the doctor's answer when its button is pressed. The answer is made up here;
    test_first_light.py tests a router's own answer.
    """
    finding = {"name": HOSTILE, "where": "w", "evidence": "e"}
    finding["changes"] = [{"field": "f", "from": "1", "to": "2"}]
    report = {"loaded": True, "watched_s": 9.6, "findings": [finding, None]}
    async with crowd(2) as one, shown(one, tmp_path / "profile", 1280) as page:
        await page.run("document.querySelector('#examine').click()")
        await page.until("!document.querySelector('#examine').disabled", "the refusal")
        assert "no worker is ready" not in await page.text("#doctor-said")  # nobody listens there
        assert (await page.text("#doctor-said")).startswith("Not examined: ")
        answer = f"new Response({json.dumps(json.dumps(report))})"
        await page.run(
            f"(() => {{ const asked = fetch; window.fetch = (path, options) => "
            f"path.startsWith('doctor') ? Promise.resolve({answer}) : asked(path, options); }})()"
        )
        await page.run("document.querySelector('#examine').click()")
        await page.until("document.querySelector('#doctor-rows tbody')", "the report")
        found = await page.text("#doctor-said")
        assert found == "2 causes in 9.6\u00a0s; the first cause costs most."
        said = await page.text("#doctor-rows tbody")
        assert HOSTILE in said
        assert "f: 1 → 2" in said
        assert await page.run(NAMELESS) == []


async def test_the_page_requests_a_key_keeps_it_in_memory_and_reports_a_wrong_key(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-one operator\n")
    async with crowd(2, admin_keys_file=str(keys)) as one:
        one.router.admin.ui.sample()
        async with opened(tmp_path / "profile") as page:
            await page.screen(360, 740)
            await page.go(f"{one.url}/ui")
            await page.until("document.querySelector('#door') && !door.hidden", "the key's form")
            assert await page.run(NAMELESS) == []
            await page.picture(tmp_path / "key.png", whole=False)
            await enter_key(page, "wrong-one")
            await page.until(
                "document.querySelector('#door-said').textContent.includes('not one')", "a refusal"
            )
            await enter_key(page, "secret-one")
            await page.until("!main.hidden", "the fleet")
            assert await page.run("document.querySelector('#key').value") == ""
            assert await page.run("[localStorage.length, sessionStorage.length]") == [0, 0]
            assert await page.run("document.cookie") == ""
            assert not any("secret" in url for url in page.asked)


async def enter_key(page: Page, key: str) -> None:
    await page.run(
        f"document.querySelector('#key').value = '{key}';"
        "document.querySelector('#door').requestSubmit()"
    )
