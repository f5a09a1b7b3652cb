//! The endpoint of a running server, from its start to its end.

use std::io;
use std::path::Path;
use std::sync::Arc;

use millpond_endpoint::{Builder, Endpoint};
use object_store::ObjectStore;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub use millpond_endpoint::RequestCounts as EndpointCounts;

use super::endpoint::EndpointSettings;
use super::endpoint_file::{Description, EndpointFile};
use super::print_status;
use super::stores::OpenedStore;
use crate::failure::{Context, FAILED, Failure, REFUSED, Result};

/// An endpoint that serves, and the file by which programs find it.
pub struct RunningEndpoint {
    serving: JoinHandle<std::result::Result<(), millpond_endpoint::Error>>,
    end: oneshot::Sender<()>,
    counts: EndpointCounts,
    _file: EndpointFile,
}

fn builder(settings: &EndpointSettings, views: &[(&OpenedStore, Arc<dyn ObjectStore>)]) -> Builder {
    let mut builder = Endpoint::builder().key_file(&settings.key_file);
    for (opened, view) in views {
        builder = builder.store(&opened.bucket, Arc::clone(view));
        if let Some(lists) = opened.paginated_lists() {
            builder = builder.lists(lists);
        }
        if !opened.keeps_metadata {
            builder = builder.drop_metadata();
        }
    }
    if let Some(address) = settings.address {
        builder = builder.listen(address);
    }
    if let Some(socket) = &settings.socket {
        builder = builder.unix(socket);
    }
    builder
}

fn refused(error: millpond_endpoint::Error) -> Failure {
    use millpond_endpoint::Error;
    let status = match error {
        Error::Listen { .. } => FAILED,
        _ => REFUSED,
    };
    let advice = match error {
        Error::BucketName { .. } => "; --store NAME=URL gives another name",
        _ => "",
    };
    Failure::new(status, format!("the endpoint: {error}{advice}"))
}

impl RunningEndpoint {
    /// Checks the settings, and returns lines about them. Nothing is created.
    pub fn check(
        settings: &EndpointSettings,
        views: &[(&OpenedStore, Arc<dyn ObjectStore>)],
    ) -> Result<String> {
        builder(settings, views).check().map_err(refused)?;
        let mut lines = Vec::new();
        lines.extend(settings.address.map(|address| match address.port() {
            0 => format!("endpoint:      http://{}, any free port", address.ip()),
            _ => format!("endpoint:      http://{address}"),
        }));
        let socket = settings.socket.as_ref();
        lines.extend(socket.map(|socket| format!("endpoint:      {}", socket.display())));
        lines.push(format!("key:           {}", settings.key_file.display()));
        let buckets = views.iter();
        lines.extend(
            buckets.map(|(opened, _)| format!("bucket:        {}: {}", opened.bucket, opened.url)),
        );
        Ok(lines.join("\n"))
    }

    /// Binds the listeners, and serves in the background. The caller listens at `server_socket`.
    pub fn start(
        settings: &EndpointSettings,
        views: Vec<(&OpenedStore, Arc<dyn ObjectStore>)>,
        server_socket: &Path,
    ) -> Result<RunningEndpoint> {
        let buckets: Vec<_> =
            views.iter().map(|(opened, _)| (&opened.bucket, &opened.url)).collect();
        let endpoint = builder(settings, &views).build().map_err(refused)?;
        let url = endpoint.address().map(|address| format!("http://{address}"));
        let key = (endpoint.access_key_id(), endpoint.secret_access_key());
        let socket = settings.socket.as_deref().map(std::path::absolute).transpose();
        let mut description = Description::new(url, socket.context("--endpoint-socket")?, key);
        for (bucket, url) in buckets {
            print_status(format_args!("bucket:        {bucket}: {url}"));
            description.add_bucket(bucket, url);
        }
        let (end, ended) = oneshot::channel::<()>();
        if let Some(url) = &description.url {
            print_status(format_args!("endpoint:      {url}"));
        }
        if let Some(socket) = &description.socket {
            print_status(format_args!("endpoint:      {}", socket.display()));
        }
        let file = EndpointFile::write(server_socket, &description)
            .context("the description of the endpoint")?;
        let counts = endpoint.counts();
        let serving = tokio::spawn(endpoint.serve(async { drop(ended.await) }));
        Ok(RunningEndpoint { serving, end, counts, _file: file })
    }

    pub fn counts(&self) -> EndpointCounts {
        self.counts.clone()
    }

    /// Waits for the end, which is a failure.
    pub async fn failed(&mut self) -> io::Error {
        match (&mut self.serving).await {
            Ok(Ok(())) => io::Error::other("it has ended"),
            Ok(Err(error)) => io::Error::other(error),
            Err(error) => error.into(),
        }
    }

    /// Ends the endpoint. Requests in progress get some seconds.
    pub async fn end(self) {
        let Self { serving, end, counts: _, _file } = self;
        drop(end);
        // It has nothing to report at its end.
        _ = serving.await;
    }
}
