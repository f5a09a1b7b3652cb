//! A program that was built without the endpoint: its settings are refused, so it never runs.

use std::io;
use std::path::Path;
use std::sync::Arc;

use object_store::ObjectStore;

pub use NoEndpoint as RunningEndpoint;

use super::endpoint::EndpointSettings;
use super::stores::OpenedStore;
use crate::failure::Result;

pub enum NoEndpoint {}

pub enum EndpointCounts {}

impl EndpointCounts {
    pub fn all(&self) -> std::iter::Empty<(&'static str, &'static str, u64)> {
        match *self {}
    }
}

impl NoEndpoint {
    pub fn check(
        _: &EndpointSettings,
        _: &[(&OpenedStore, Arc<dyn ObjectStore>)],
    ) -> Result<String> {
        unreachable!("the settings were refused")
    }

    pub fn start(
        _: &EndpointSettings,
        _: Vec<(&OpenedStore, Arc<dyn ObjectStore>)>,
        _: &Path,
    ) -> Result<NoEndpoint> {
        unreachable!("the settings were refused")
    }

    pub fn counts(&self) -> EndpointCounts {
        match *self {}
    }

    pub async fn failed(&mut self) -> io::Error {
        match *self {}
    }

    pub async fn end(self) {
        match self {}
    }
}
