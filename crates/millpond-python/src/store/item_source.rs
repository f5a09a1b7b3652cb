//! A stream that calls take items from: the pieces of a body, or the metadata of a list.
//!
//! ```text
//! fill (a future reads) -> unread -> try_take (the caller's thread makes Python objects) -> finish
//! ```
//!
//! - **SO1** No item is lost, and none is out of order. A future may be dropped at any wait, and its result unused, by Ctrl-C
//!   or by the cancellation of a task, also after the loop has the result. So the future only reads. The items stay in `unread`
//!   until the call makes its Python objects, on the caller's thread and with no wait after that.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::{Error, Result};
use tokio::sync::Mutex as TaskMutex;

pub(crate) struct ItemSource<T> {
    stream: TaskMutex<BoxStream<'static, Result<T>>>,
    /// Not used in a child of fork, as it has no calls of the parent.
    read: Mutex<ReadItems<T>>,
    /// The number of items, or of bytes, that an item counts for.
    weight: fn(&T) -> usize,
}

struct ReadItems<T> {
    unread: Vec<T>,
    end: Option<StreamEnd>,
}

enum StreamEnd {
    Complete,
    /// Each later call raises the error, so that no loop takes it for the end.
    Failed(Arc<Error>),
}

impl<T: Send + 'static> ItemSource<T> {
    pub(crate) fn new(
        stream: BoxStream<'static, Result<T>>,
        weight: fn(&T) -> usize,
    ) -> Arc<ItemSource<T>> {
        let read = Mutex::new(ReadItems { unread: Vec::new(), end: None });
        Arc::new(ItemSource { stream: TaskMutex::new(stream), read, weight })
    }

    /// Reads until the items that no call has taken have a total weight of `enough`, or until the end.
    pub(crate) async fn fill(&self, enough: usize) {
        let mut stream = self.stream.lock().await;
        let mut total: usize = self.lock().unread.iter().map(self.weight).sum();
        while total < enough && self.lock().end.is_none() {
            let next = stream.next().await;
            let mut read = self.lock();
            match next {
                Some(Ok(item)) => {
                    total = total.saturating_add((self.weight)(&item));
                    read.unread.push(item);
                }
                Some(Err(error)) => read.end = Some(StreamEnd::Failed(Arc::new(error))),
                None => read.end = Some(StreamEnd::Complete),
            }
        }
    }

    /// The next items: as few as have a total weight of `enough`, or all that are left. `None`: another call has taken some since
    /// `fill`, which is to be repeated.
    pub(crate) fn try_take(
        self: &Arc<Self>,
        enough: usize,
    ) -> std::result::Result<Option<TakenItems<T>>, Arc<Error>> {
        let mut read = self.lock();
        let (mut count, mut total) = (0, 0usize);
        while let Some(item) = read.unread.get(count)
            && total < enough
        {
            total = total.saturating_add((self.weight)(item));
            count += 1;
        }
        match &read.end {
            Some(StreamEnd::Failed(error)) if total < enough => return Err(Arc::clone(error)),
            None if total < enough => return Ok(None),
            _ => (),
        }
        let items = read.unread.drain(..count).collect();
        Ok(Some(TakenItems { items, source: Arc::clone(self) }))
    }
}

impl<T> ItemSource<T> {
    fn lock(&self) -> MutexGuard<'_, ReadItems<T>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Items of a source for one call. If it fails to make its Python objects, they go back.
pub(crate) struct TakenItems<T> {
    items: Vec<T>,
    source: Arc<ItemSource<T>>,
}

impl<T> TakenItems<T> {
    pub(crate) fn items(&self) -> &[T] {
        &self.items
    }

    /// The items have been returned.
    pub(crate) fn finish(mut self) {
        self.items.clear();
    }
}

impl<T> Drop for TakenItems<T> {
    fn drop(&mut self) {
        if !self.items.is_empty() {
            let mut read = self.source.lock();
            self.items.append(&mut read.unread);
            mem::swap(&mut read.unread, &mut self.items);
        }
    }
}
