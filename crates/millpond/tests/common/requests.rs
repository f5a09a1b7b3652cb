//! Requests through a pipeline, one value for each.

use millpond::Result;
use millpond::direct::{DirectRequest, Pipeline};

/// A request that has ended.
pub struct Done<'a> {
    pub request: DirectRequest<'a>,
    pub outcome: Result<usize>,
}

/// Runs a pipeline and builds each request separately: `step` receives each completed request and
/// returns the next one.
pub fn each<'a>(
    pipeline: &mut Pipeline,
    mut step: impl FnMut(Option<Done<'a>>) -> Option<DirectRequest<'a>>,
) {
    pipeline
        .run(|lane| step(lane.into_ended().map(|(request, outcome)| Done { request, outcome })));
}

/// The same request at another offset.
pub fn at(mut request: DirectRequest<'_>, offset: u64) -> DirectRequest<'_> {
    request.set_offset(offset);
    request
}
