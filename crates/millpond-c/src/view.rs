//! Views: borrowed bytes of the cache.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use millpond::{File, View};

use crate::call::{Failure, fault, status, store};
use crate::file::millpond_file;
use crate::objects::{FILES, VIEWS, ViewObject};

/// Borrowed bytes of the cache: a snapshot, which later changes of the file do not affect.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct millpond_view {
    /// The bytes, read-only. Valid until the view is released.
    pub data: *const c_void,
    /// The number of bytes.
    pub len: usize,
    /// The view's handle; 0: no view.
    pub id: u64,
}

/// Borrows cached bytes: at most `len` bytes from byte `offset`, up to the end of the page or of the file;
/// 0 bytes at and beyond the end. Stores the view at `view`. The view pins a page of the cache until it is
/// released. Blocks while the page is read.
///
/// The memory belongs to the cache. A program must not write to it: no check catches that. The file may be
/// closed before the view is released.
///
/// Returns 0, or
/// -EBADF       there is no such file, it is not open for reading, or belongs to a parent process
/// -EINVAL      the range ends beyond INT64_MAX
/// -EFAULT      `view` is NULL
/// -ENOBUFS     views pin half of the cache already
/// -EMFILE      there are 1,048,576 views
/// -EIO, ...    the page could not be read
///
/// # Safety
///
/// `view` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_view_take(
    file: millpond_file,
    offset: u64,
    len: usize,
    view: *mut millpond_view,
) -> c_int {
    status(|| {
        if view.is_null() {
            return Err(fault("the address for the view is NULL"));
        }
        let file = FILES.get(file.id)?;
        let taken = file.view(offset, len)?;
        let (data, len) = (taken.as_ptr().cast(), taken.len());
        // SAFETY: the view borrows from the file. `ViewObject` holds a reference to the file and drops it after
        // the view; the content of an Arc does not move.
        let taken: View<'static> = unsafe { std::mem::transmute::<View<'_>, View<'static>>(taken) };
        let viewed = ViewObject { _view: taken, _file: Arc::<File>::clone(&file) };
        let id = VIEWS
            .insert(Arc::new(viewed))
            .map_err(|_| Failure::Refused(libc::EMFILE, "there are too many views"))?;
        // SAFETY: our caller's promise.
        unsafe { store(view, millpond_view { data, len, id }) }
    })
}

/// Releases a view; its memory must not be used any more. Sets all members of `view` to 0. Release one copy
/// of the struct only.
///
/// Returns 0, or
/// -EBADF       there is no such view, or it was released before
/// -EFAULT      `view` is NULL
///
/// # Safety
///
/// `view` is NULL, or valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millpond_view_release(view: *mut millpond_view) -> c_int {
    status(|| {
        if view.is_null() {
            return Err(fault("the address of the view is NULL"));
        }
        // SAFETY: our caller's promise.
        let id = unsafe { (*view).id };
        drop(VIEWS.take(id)?);
        // SAFETY: our caller's promise.
        unsafe { store(view, millpond_view { data: std::ptr::null(), len: 0, id: 0 }) }
    })
}
