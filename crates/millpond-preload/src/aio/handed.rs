//! A read that the kernel carries out in the program's context, by a descriptor of the engine's: `aio.A6`.

use millpond::UnguardedRead;

use crate::aio::transfer::{carry_out, count_read};
use crate::files::pin::Pin;
use crate::files::segments::{Direction, Segments};
use crate::runtime::section;

/// Its fields are dropped in their order: the read is of a file that the pin keeps.
pub struct Handed {
    pub read: UnguardedRead,
    pub pin: Pin,
    /// Where the program wants the bytes, and how many: valid until the completion was taken (aio.A3).
    pub memory: (*mut u8, usize),
    pub offset: u64,
}

impl Handed {
    /// Its completion was taken: the result that the program gets. Waits only where the read does not count.
    pub fn end(self, result: i64) -> i64 {
        section::open(|_| {
            let Self { read, pin, memory: (start, len), offset } = self;
            let is_whole = result == len as i64;
            let counts = match pin.served_file() {
                // SAFETY: both were given to `begin_unguarded` of this description's file.
                Some(file) if is_whole => unsafe { file.end_unguarded(read, start) },
                _ => {
                    drop(read);
                    false
                }
            };
            let result = if counts {
                count_read(&pin, len, false);
                result
            } else {
                // SAFETY: aio.A3: the memory is the request's until this returns.
                unsafe { self::read(&pin, (start, len), offset) as i64 }
            };
            // The end of a description is no read of the engine's: signals are blocked.
            if let Err(last) = pin.try_give_up() {
                section::run(|_| drop(last));
            }
            result
        })
    }

    /// In a forked child, where nobody takes its completion: the frame is the parent's.
    pub fn leave(self) {
        let Self { read, pin, .. } = self;
        std::mem::forget(read);
        // The last one stays: what else there is of the description is left behind elsewhere.
        if let Err(last) = pin.try_give_up() {
            std::mem::forget(last);
        }
    }

    /// The kernel has not taken it: reads, waiting. In a section.
    pub fn carry_out(self) -> isize {
        let Self { read, pin, memory, offset } = self;
        drop(read);
        // SAFETY: aio.A3.
        unsafe { self::read(&pin, memory, offset) }
    }
}

/// # Safety
///
/// As for [`carry_out`].
unsafe fn read(pin: &Pin, (start, len): (*mut u8, usize), offset: u64) -> isize {
    // SAFETY: the caller's duty.
    unsafe { carry_out(pin, &Segments::One(start, len), offset, Direction::Read) }
}
