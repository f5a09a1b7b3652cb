//! The benchmark's data and queries: a table of sales in Parquet files, generated from a seed.

use std::sync::Arc;

use datafusion::arrow::array::{
    ArrayRef, Date32Array, Float64Array, Int32Array, Int64Array, StringArray,
};
use datafusion::arrow::record_batch::RecordBatch;
use datafusion::parquet::arrow::ArrowWriter;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};

use crate::common::Done;

const ROWS_OF_BATCH: usize = 65_536;
/// About 64 bytes per row, most of them incompressible.
const BATCHES_OF_FILE: usize = 16;
pub const PREFIX: &str = "sales";

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

fn batch(random: &mut Random, first: i64) -> RecordBatch {
    const REGIONS: [&str; 6] = ["north", "south", "east", "west", "sea", "hills"];
    let rows = ROWS_OF_BATCH as i64;
    let day = |row: i64| (19_000 + (first + row) / 40_000) as i32;
    let mut floats = |end: u64| -> ArrayRef {
        // Sums of these values and of their products are exact in any order.
        let one = || random.below(end << 6) as f64 / 64.0;
        Arc::new(Float64Array::from_iter_values(std::iter::repeat_with(one).take(ROWS_OF_BATCH)))
    };
    let (price, weight) = (floats(1000), floats(50));
    let customers = (0..rows).map(|_| random.below(200_000) as i32).collect::<Vec<_>>();
    let quantities = (0..rows).map(|_| random.below(100) as i32).collect::<Vec<_>>();
    let regions = (0..rows).map(|_| REGIONS[random.below(6) as usize]).collect::<Vec<_>>();
    let notes = (0..rows).map(|_| format!("{:016x}{:08x}", random.next(), random.next() as u32));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("id", Arc::new(Int64Array::from_iter_values(first..first + rows))),
        ("day", Arc::new(Date32Array::from_iter_values((0..rows).map(day)))),
        ("customer", Arc::new(Int32Array::from(customers))),
        ("quantity", Arc::new(Int32Array::from(quantities))),
        ("price", price),
        ("weight", weight),
        ("region", Arc::new(StringArray::from(regions))),
        ("note", Arc::new(StringArray::from_iter_values(notes))),
    ];
    RecordBatch::try_from_iter(columns).expect("columns of one length")
}

/// Writes files of about `bytes` bytes in total; returns the numbers of files and bytes.
pub async fn put(store: &dyn ObjectStore, bytes: u64) -> Done<(u64, u64)> {
    let (mut random, mut first) = (Random(20), 0);
    let (mut files, mut written) = (0, 0);
    while written < bytes {
        let mut file = Vec::new();
        let one = batch(&mut random, first);
        let mut writer = ArrowWriter::try_new(&mut file, one.schema(), None)?;
        writer.write(&one)?;
        first += ROWS_OF_BATCH as i64;
        for _ in 1..BATCHES_OF_FILE {
            writer.write(&batch(&mut random, first))?;
            first += ROWS_OF_BATCH as i64;
            writer.flush()?;
        }
        writer.close()?;
        written += file.len() as u64;
        store
            .put(&Path::from(format!("{PREFIX}/{files:03}.parquet")), PutPayload::from(file))
            .await?;
        files += 1;
    }
    Ok((files, written))
}

/// The queries: dashboards, look-ups, reports and exports.
pub const QUERIES: [&str; 20] = [
    "select count(*) from sales",
    "select min(day), max(day), min(id), max(id) from sales",
    "select region, count(*), sum(quantity) from sales group by region order by region",
    "select region, avg(price) from sales where quantity > 90 group by region order by region",
    "select sum(price * quantity) from sales",
    "select sum(price * quantity) from sales where day = date '2022-01-20'",
    "select * from sales where id = 1234567",
    "select * from sales where id between 2000000 and 2000020 order by id",
    "select customer, sum(price) as total from sales group by customer order by total desc, customer limit 10",
    "select customer, count(*) from sales where region = 'sea' group by customer order by 2 desc, 1 limit 10",
    "select day, sum(quantity) from sales group by day order by day limit 30",
    "select count(distinct customer) from sales",
    "select max(weight), region from sales where price < 1 group by region order by region",
    "select note from sales where id in (17, 1000017, 3000017) order by note",
    "select count(*) from sales where note like 'abc%'",
    "select quantity, avg(weight) from sales where customer < 1000 group by quantity order by quantity",
    "select id, price from sales order by price desc, id limit 20",
    "select a.region, count(*) from sales a join (select customer from sales where price > 999.9) b \
     on a.customer = b.customer group by a.region order by 1",
    "select sum(weight) from sales where day between date '2022-01-10' and date '2022-01-12'",
    "select region, quantity, count(*) from sales group by region, quantity order by 1, 2 limit 50",
];
