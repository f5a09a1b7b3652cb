//! Lists as long as a caller's request or a size in the options: if memory is refused, the error is ENOMEM.

use std::io;

use object_store::{Error, Result};

/// An empty list with room for `len_max` items.
pub(crate) fn try_empty<T>(len_max: usize) -> Result<Vec<T>> {
    with_room(len_max).map_err(|error| Error::Generic { store: crate::NAME, source: error.into() })
}

/// A list of `items`, at most `len_max` of them.
pub(crate) fn try_list<T>(len_max: usize, items: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let mut list = try_empty(len_max)?;
    list.extend(items.take(len_max));
    Ok(list)
}

/// A block of `len` equal items.
pub(crate) fn try_block<T: Clone>(item: T, len: usize) -> io::Result<Box<[T]>> {
    let mut block = with_room(len)?;
    block.resize(len, item);
    Ok(block.into())
}

/// Whether the error is that of a refused list.
pub(crate) fn is_no_memory(error: &Error) -> bool {
    let Error::Generic { source, .. } = error else { return false };
    let error = source.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.raw_os_error() == Some(libc::ENOMEM))
}

fn with_room<T>(len_max: usize) -> io::Result<Vec<T>> {
    let mut list = Vec::new();
    let reserved = list.try_reserve_exact(len_max);
    reserved.map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
    Ok(list)
}
