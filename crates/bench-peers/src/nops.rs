//! io_uring requests that do nothing: the minimal cost of a request in the kernel.

use std::io;

use io_uring::{IoUring, opcode};

/// A ring for no-op requests.
pub struct Nops {
    ring: IoUring,
}

impl std::fmt::Debug for Nops {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nops").finish_non_exhaustive()
    }
}

impl Nops {
    /// Number of requests that are submitted and reaped together.
    pub const BATCH: usize = 32;

    /// Creates a ring.
    ///
    /// # Errors
    ///
    /// The system's error if io_uring is forbidden.
    pub fn new() -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(Self::BATCH as u32)?;
        Ok(Self { ring })
    }

    /// Submits a batch and reaps it.
    ///
    /// # Errors
    ///
    /// The ring's error.
    pub fn batch(&mut self) -> io::Result<()> {
        let mut queue = self.ring.submission();
        for number in 0..Self::BATCH {
            let nop = opcode::Nop::new().build().user_data(number as u64);
            // SAFETY: the request refers to no memory.
            unsafe { queue.push(&nop) }.map_err(io::Error::other)?;
        }
        drop(queue);
        let mut reaped = 0;
        while reaped < Self::BATCH {
            self.ring.submit_and_wait(Self::BATCH - reaped)?;
            for done in self.ring.completion() {
                std::hint::black_box(done.user_data());
                reaped += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_end() {
        let mut nops = match Nops::new() {
            Ok(nops) => nops,
            Err(error) => return crate::skip::skip(format_args!("no io_uring here: {error}")),
        };
        for _ in 0..100 {
            nops.batch().unwrap();
        }
    }
}
