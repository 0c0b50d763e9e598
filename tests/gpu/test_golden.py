"""The kernels against the model authors' own numbers (tests/golden/tiny-a)."""

from __future__ import annotations

import pytest

from helpers.device import BACKEND, REHEARSAL, report
from helpers.device_rig import TINY
from ultraflash.tools import check_golden

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]


@pytest.mark.skipif(REHEARSAL, reason="tests/e2e/test_golden.py does this on the interpreter")
@pytest.mark.parametrize("attention", ["bf16", "fp32"])
def test_engine_agrees_with_the_reference(
    attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(TINY.parent), "--backend", BACKEND, "--attention", attention]
    status = check_golden.main(options)
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if "  FAIL" in line]
    assert status == 0, "\n".join(failed[:40])
    assert not failed
    passed = sum("  PASS" in line for line in lines)
    assert passed > 1000
    report(f"golden, {attention} attention weights: {passed} passed, 0 failed")
