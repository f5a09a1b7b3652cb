//! DataFusion over a store that has the benchmark's files.

use std::sync::Arc;
use std::time::Instant;

use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::prelude::{ParquetReadOptions, SessionContext};
use object_store::ObjectStore;
use object_store::aws::AmazonS3Builder;

use crate::common::Done;
use crate::data;

/// The store that the environment names.
pub fn s3(bucket: &str) -> Done<Arc<dyn ObjectStore>> {
    let s3 = AmazonS3Builder::from_env().with_bucket_name(bucket).with_allow_http(true);
    Ok(Arc::new(s3.build()?))
}

pub struct Session {
    context: SessionContext,
}

impl Session {
    pub async fn open(store: Arc<dyn ObjectStore>, bucket: &str) -> Done<Session> {
        let context = SessionContext::new();
        context.register_object_store(&url::Url::parse(&format!("s3://{bucket}"))?, store);
        let place = format!("s3://{bucket}/{}/", data::PREFIX);
        context.register_parquet("sales", &place, ParquetReadOptions::default()).await?;
        Ok(Session { context })
    }

    /// The time that a query takes, in seconds, and its answer.
    pub async fn ask(&self, query: &str) -> Done<(f64, String)> {
        let begun = Instant::now();
        let batches = self.context.sql(query).await?.collect().await?;
        let seconds = begun.elapsed().as_secs_f64();
        Ok((seconds, pretty_format_batches(&batches)?.to_string()))
    }
}
