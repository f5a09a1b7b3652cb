//! Memory for direct I/O.

use std::ffi::{c_int, c_void};

use crate::call::{check_memory, invalid, status};
use crate::engine::millpond_engine;
use crate::handle::with_buffers;
use crate::objects::ENGINES;

/// Gives out `count` pieces of memory of `bytes` bytes each, zero, and aligned to 4096 bytes, which is
/// enough for O_DIRECT on every file system known to us. Stores their addresses at `memory`, an array of
/// `count`. The engine's memory limit does not count them; they may be used with any engine, and outlive
/// this one.
///
/// Returns 0, or
/// -EBADF       there is no such engine
/// -EFAULT      `memory` is NULL
/// -EINVAL      `bytes` is 0, or the product too large
/// -ENOMEM      there is no memory
///
/// # Safety
///
/// `memory` is NULL, or valid for writes of `count` pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_buffers_alloc(
    engine: millpond_engine,
    count: usize,
    bytes: usize,
    memory: *mut *mut c_void,
) -> c_int {
    status(|| {
        check_memory(memory, count)?;
        let buffers = ENGINES.get(engine.id)?.alloc_buffers(count, bytes)?;
        with_buffers(|all| {
            for (number, mut buffer) in buffers.into_iter().enumerate() {
                let address = buffer.as_mut_ptr();
                all.insert(address.addr(), buffer);
                // SAFETY: our caller's promise; fewer than `count`.
                unsafe { memory.add(number).write(address.cast()) };
            }
        });
        Ok(())
    })
}

/// Gives `count` pieces of memory back, of one or several `millpond_buffers_alloc`. None may be in use by a
/// request that has not completed.
///
/// Returns 0, or
/// -EFAULT      `memory` is NULL
/// -EINVAL      one of them was not given out, or has been given back; none has been given back then
///
/// # Safety
///
/// `memory` is NULL, or valid for reads of `count` pointers; nobody uses what they point to any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_buffers_free(memory: *const *mut c_void, count: usize) -> c_int {
    status(|| {
        check_memory(memory, count)?;
        if count == 0 {
            return Ok(());
        }
        // SAFETY: our caller's promise.
        let addresses = unsafe { std::slice::from_raw_parts(memory, count) };
        let mut taken = Vec::new();
        let complete = with_buffers(|all| {
            for address in addresses {
                match all.remove(&address.addr()) {
                    Some(buffer) => taken.push((address.addr(), buffer)),
                    None => {
                        all.extend(taken.drain(..));
                        return false;
                    }
                }
            }
            true
        });
        if complete { Ok(()) } else { Err(invalid("memory that was not given out")) }
    })
}
