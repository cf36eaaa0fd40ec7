"""Ctrl-C and SIGTERM: answered at once, once, and never in the middle of a clean-up."""

import signal

import pytest

from dpfp_ray.system.terminal import Interrupted, ignoring_signals, signal_of, stopped_by_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_and_says_which_it_was(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Interrupted) as stop, stopped_by_signals("stopping"):
        signal.raise_signal(number)
    assert stop.value.number == number
    assert capsys.readouterr().err == "stopping\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_clean_up_is_not_interrupted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with ignoring_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_signal_is_known_by_an_error_that_does_not_name_it() -> None:
    with pytest.raises(Interrupted), stopped_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal_of(KeyboardInterrupt()) == signal.SIGTERM
    with stopped_by_signals():
        assert signal_of(KeyboardInterrupt()) == signal.SIGINT
