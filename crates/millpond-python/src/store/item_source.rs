//! A stream that calls take items from: the pieces of a body, or the metadata of a list.
//!
//! **SO1** No item is lost. A call may be dropped at any wait, and its result may be dropped unused, by Ctrl-C or by the
//! cancellation of a task. So the items that it has read stay here, or come back, until its reply makes Python objects of them.

use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::{Error, Result};

/// Items that were read, but not returned yet. Not used in a child of fork, as it has no calls of the parent.
type Unread<T> = Arc<Mutex<Vec<T>>>;

pub(crate) struct ItemSource<T> {
    stream: BoxStream<'static, Result<T>>,
    unread: Unread<T>,
    /// The error that has ended the stream. Each later call raises it, so that no loop takes it for the end.
    failed: Option<Arc<Error>>,
}

impl<T: Send + 'static> ItemSource<T> {
    pub(crate) fn new(stream: BoxStream<'static, Result<T>>) -> ItemSource<T> {
        ItemSource { stream: stream.fuse().boxed(), unread: Unread::default(), failed: None }
    }

    /// The next items: as few as have a total weight of `enough`, or all that are left.
    pub(crate) async fn take(
        &mut self,
        enough: usize,
        weight: impl Fn(&T) -> usize,
    ) -> std::result::Result<TakenItems<T>, Arc<Error>> {
        let mut total: usize = lock(&self.unread).iter().map(&weight).sum();
        while total < enough {
            if let Some(error) = &self.failed {
                return Err(Arc::clone(error));
            }
            match self.stream.next().await {
                Some(Ok(item)) => {
                    total = total.saturating_add(weight(&item));
                    lock(&self.unread).push(item);
                }
                Some(Err(error)) => self.failed = Some(Arc::new(error)),
                None => break,
            }
        }
        let mut unread = lock(&self.unread);
        // More than enough may have come back from a call for more.
        let (mut count, mut total) = (0, 0usize);
        while let Some(item) = unread.get(count)
            && total < enough
        {
            total = total.saturating_add(weight(item));
            count += 1;
        }
        let items = unread.drain(..count).collect();
        drop(unread);
        Ok(TakenItems { items, unread: Arc::clone(&self.unread) })
    }
}

fn lock<T>(unread: &Mutex<Vec<T>>) -> std::sync::MutexGuard<'_, Vec<T>> {
    unread.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Items of a source for one call. Those that are left at the end go back.
pub(crate) struct TakenItems<T> {
    items: Vec<T>,
    unread: Unread<T>,
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
            let mut unread = lock(&self.unread);
            self.items.append(&mut unread);
            mem::swap(&mut *unread, &mut self.items);
        }
    }
}
