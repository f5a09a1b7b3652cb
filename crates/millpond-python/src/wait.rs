//! Waits that Ctrl-C interrupts.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// The time after which a waiting thread lets Python run its signal handlers. A signal does not end a wait for the
/// engine, so the main thread looks by itself.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for `future`, detached from the interpreter. `None`: `deadline` has passed. An exception of a signal handler
/// ends the wait, and drops the future.
pub(crate) fn wait_for<F: Future + Send>(
    py: Python<'_>,
    mut future: Pin<&mut F>,
    deadline: Option<Instant>,
) -> PyResult<Option<F::Output>>
where
    F::Output: Send,
{
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        let polled = py.detach(|| {
            let looked = Instant::now();
            loop {
                if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker))
                {
                    return Some(output);
                }
                let left = deadline
                    .map_or(SIGNALS_EVERY, |at| at.saturating_duration_since(Instant::now()));
                if left.is_zero() || looked.elapsed() >= SIGNALS_EVERY {
                    return None;
                }
                std::thread::park_timeout(left.min(SIGNALS_EVERY));
            }
        });
        if polled.is_some() {
            return Ok(polled);
        }
        py.check_signals()?;
        if deadline.is_some_and(|at| at <= Instant::now()) {
            return Ok(None);
        }
    }
}
