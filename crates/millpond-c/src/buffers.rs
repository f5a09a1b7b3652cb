//! Aligned memory for direct I/O.

use std::ffi::{c_int, c_void};

use crate::call::{NO_MEMORY, check_memory, invalid, status};
use crate::engine::millpond_engine;
use crate::handle::with_buffers;
use crate::objects::ENGINES;

/// Allocates `count` zeroed buffers of `bytes` bytes each, aligned to 4096 bytes, which suffices for
/// O_DIRECT on all file systems known to us. Stores their addresses at `memory`, an array of `count`. They
/// do not count against the engine's memory limit, may be used with any engine, and may outlive this one.
///
/// Returns 0, or
/// -EBADF       there is no such engine
/// -EFAULT      `memory` is NULL
/// -EINVAL      `bytes` is 0, or the product is too large
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
            all.try_reserve(count).map_err(|_| NO_MEMORY)?;
            for (number, mut buffer) in buffers.into_iter().enumerate() {
                let address = buffer.as_mut_ptr();
                all.insert(address.addr(), buffer);
                // SAFETY: our caller's promise; fewer than `count`.
                unsafe { memory.add(number).write(address.cast()) };
            }
            Ok(())
        })
    })
}

/// Frees `count` buffers of one or several calls of `millpond_buffers_alloc`. None may be in use by a
/// request that has not completed.
///
/// Returns 0, or
/// -EFAULT      `memory` is NULL
/// -EINVAL      one of them is not an allocated buffer; none has been freed
/// -ENOMEM      there is no memory for a list of them; none has been freed
///
/// # Safety
///
/// `memory` is NULL, or valid for reads of `count` pointers, and the buffers are not used any more.
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
        taken.try_reserve_exact(count).map_err(|_| NO_MEMORY)?;
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
        if complete { Ok(()) } else { Err(invalid("an address that is not an allocated buffer")) }
    })
}
