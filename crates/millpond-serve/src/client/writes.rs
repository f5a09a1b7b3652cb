//! Writes of objects, with a notice to the server before and after each.
//!
//! - **WR1** A write that has returned has removed its objects from the server's cache. The future of a write that was dropped has
//!   sent the message that does so, and its client does not find the object before.
//! - **WR2** If no server answers at the start, the objects are removed at the end, from the cache of a server that answers
//!   then. If the server dies between, its cache is gone as well.

use std::sync::Arc;

use object_store::path::Path;

use crate::client::attachment::Attachment;
use crate::client::client_parts::ClientParts;
use crate::client::link::Answer;
use crate::protocol::Request;

/// A write of one object. Dropped before [`WriteNotice::end`], it sends the end without waiting for the answer.
pub(crate) struct WriteNotice {
    parts: Arc<ClientParts>,
    location: Path,
    /// The server that knows of it, and the number of the write there.
    begun: Option<(Arc<Attachment>, u64)>,
    is_ended: bool,
}

impl WriteNotice {
    pub(crate) async fn begin(parts: &Arc<ClientParts>, location: &Path) -> WriteNotice {
        let mut notice = WriteNotice {
            parts: Arc::clone(parts),
            location: location.clone(),
            begun: None,
            is_ended: false,
        };
        if let Some(attachment) = parts.attached().await {
            attachment.objects.remove(location);
            let request = Request::BeginWrite { location: location.to_string() };
            if let Some((number, answer)) = attachment.link.start(&request, 0) {
                // From here on a drop ends the write.
                notice.begun = Some((attachment, number));
                if !matches!(answer.await, Ok(Answer::Done(_))) {
                    notice.begun = None;
                }
            }
        }
        notice
    }

    /// The write has ended, in whichever way.
    pub(crate) async fn end(mut self) {
        self.is_ended = true;
        if let Some((attachment, number)) = self.begun.take() {
            attachment.objects.remove(&self.location);
            let request = Request::EndWrite { begun: number };
            if let Some((_, answer)) = attachment.link.start(&request, 0)
                && answer.await.is_ok()
            {
                return;
            }
        }
        // WR2.
        forget(&self.parts, &self.location).await;
    }
}

impl Drop for WriteNotice {
    fn drop(&mut self) {
        if self.is_ended {
            return;
        }
        match &self.begun {
            Some((attachment, number)) if attachment.is_own() => {
                attachment.objects.remove(&self.location);
                _ = attachment.link.start(&Request::EndWrite { begun: *number }, 0);
            }
            _ => forget_soon(&self.parts, &self.location),
        }
    }
}

/// Removes an object from the server's cache, if a server answers.
pub(crate) async fn forget(parts: &Arc<ClientParts>, location: &Path) {
    if let Some(attachment) = parts.attached().await {
        attachment.objects.remove(location);
        let request = Request::Forget { location: location.to_string() };
        if let Some((_, answer)) = attachment.link.start(&request, 0) {
            // Without an answer the server is gone, and its cache as well.
            _ = answer.await;
        }
    }
}

/// The same, without waiting.
pub(crate) fn forget_soon(parts: &Arc<ClientParts>, location: &Path) {
    if let Some(attachment) = parts.attachment() {
        attachment.objects.remove(location);
        let request = Request::Forget { location: location.to_string() };
        _ = attachment.link.start(&request, 0);
    }
}
