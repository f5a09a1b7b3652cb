//! A read that the kernel carries out in the program's context, by a descriptor of the engine: `aio.A6`.

use millpond::internals::UnguardedRead;

use crate::aio::transfer::{carry_out, count_read};
use crate::files::pin::Pin;
use crate::files::segments::{Direction, Segments};
use crate::runtime::section;

/// Its fields are dropped in order: the pin keeps the file of the read.
pub struct OptimisticRead {
    pub read: UnguardedRead,
    pub pin: Pin,
    /// Address and length of the program's buffer: valid until the completion was taken (aio.A3).
    pub memory: (*mut u8, usize),
    pub offset: u64,
}

impl OptimisticRead {
    /// Returns the program's result after the completion was taken. Waits only if the read is not valid.
    pub fn end(self, result: i64) -> i64 {
        section::open(|_| {
            let Self { read, pin, memory: (start, len), offset } = self;
            let is_whole = result == len as i64;
            let counts = match pin.served_file() {
                // SAFETY: both were passed to `begin_unguarded` of this description's file.
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
                // SAFETY: aio.A3: the request owns the memory until this returns.
                unsafe { self::read(&pin, (start, len), offset) as i64 }
            };
            // The end of a description must not run as an engine's read: signals are blocked.
            if let Err(last) = pin.try_give_up() {
                section::run(|_| drop(last));
            }
            result
        })
    }

    /// Reads and waits, as the kernel has refused the read. In a section.
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
