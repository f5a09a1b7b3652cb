//! Signals during reads and writes: no handler runs inside the library's own work, no signal is lost, and each
//! handler gets the kernel's arguments.

mod common;

use common::{ALL_MODES, Pond, succeed};

/// Runs the scenario on the kernel, in all modes, handed over at random moments, and with a cache of a few pages.
fn run(scenario: &str) {
    let alone = Pond::new();
    let program = alone.compile_with("signals.c", &["-O1"], &["-lpthread"]);
    succeed(alone.plain(&program).arg(scenario));
    for pond in Pond::unmeasured() {
        succeed(pond.served(&program).arg(scenario));
    }
    for mode in ALL_MODES {
        for cache_bytes in [64 << 20, 256 << 10] {
            let pond = Pond::with_cache_bytes(cache_bytes).in_mode(mode);
            succeed(pond.served(&program).arg(scenario));
            assert!(pond.report().served_bytes > 1 << 20, "{mode:?}, {cache_bytes}");
        }
    }
}

/// Goal: real-time signals arrive in order, each once, with the value that was sent, and their handler runs with the
/// requested mask; the thread's mask is unchanged after that.
#[test]
fn queued_signals_come_in_order() {
    run("queued");
}

/// Goal: a standard signal arrives with the value that was sent, and not after a later one.
#[test]
fn standard_signals_come_with_their_values() {
    run("standard");
}

/// Goal: handlers of timers nest, use a stack of their own and jump away, at any point of the library and of the
/// program.
#[test]
fn handlers_of_timers() {
    run("timers");
}

/// Goal: a handler for one signal is called once.
#[test]
fn handlers_for_one_signal() {
    run("once");
}

/// Goal: `sigaction` returns the handlers that the program has set, and signals call them.
#[test]
fn handlers_are_what_was_set() {
    run("told");
}
