//! One side of the comparison as a process: requests and answers are JSON objects, one a line, on
//! stdin and stdout. `benches/peers/peers/worker.py` is the same for the sides in Python, and says
//! what each request means.

mod plain;

use anyhow::{Context, bail};
use candle_core::{DType, Device, Tensor, safetensors};
use metal_candle::adapter::Adapter;
use metal_candle::devices;
use metal_candle::memory::peak_resident_bytes;
use metal_candle::model::{Model, ModelFormat};
use metal_candle_bench::machine::{Machine, Peaks};
use metal_candle_bench::rows::{self, Inputs, Precision, Row};
use metal_candle_bench::timing::{in_a_queue, one_by_one, queue_length, warm_up};
use metal_candle_bench::{Work, Workload, model, operations};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Whose code does the work.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    MetalCandle,
    Candle,
}

#[derive(Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
enum Request {
    Describe,
    Rows {
        shape: Option<String>,
        #[serde(default)]
        gpu: bool,
    },
    Peaks,
    Checkpoint {
        shape: String,
        seed: u64,
        folder: PathBuf,
    },
    Convert {
        model: PathBuf,
        format: String,
        path: PathBuf,
    },
    Prepare {
        row: Box<Row>,
        inputs: PathBuf,
        model: Option<PathBuf>,
        adapter: Option<PathBuf>,
    },
    Outputs {
        path: PathBuf,
    },
    Time {
        queue: bool,
        calls: usize,
        warm_up: f64,
    },
    Memory,
    Release,
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let side = match arguments.next().as_deref() {
        Some("metal-candle") => Side::MetalCandle,
        Some("candle") => Side::Candle,
        other => bail!("side: is {other:?}, expected metal-candle or candle"),
    };
    let device = match arguments.next().as_deref() {
        None | Some("cpu") => Ok(Device::Cpu),
        Some("cuda") => devices::cuda(0).map_err(|error| error.to_string()),
        Some("metal") => devices::metal(0).map_err(|error| error.to_string()),
        Some(other) => Err(format!("not supported in this build: {other}")),
    };
    let mut workload: Option<Box<dyn Workload>> = None;
    let mut row: Option<Row> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = match &device {
            Ok(device) => serde_json::from_str(&line)
                .context("cannot read the request")
                .and_then(|request| answer(side, device, request, &mut workload, &mut row))
                .unwrap_or_else(|error| json!({"error": format!("{error:#}")})),
            Err(problem) => json!({"unsupported": problem}),
        };
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{answer}")?;
        stdout.flush()?;
    }
    Ok(())
}

fn answer(
    side: Side,
    device: &Device,
    request: Request,
    workload: &mut Option<Box<dyn Workload>>,
    row: &mut Option<Row>,
) -> anyhow::Result<Value> {
    let ready = "nothing is prepared";
    Ok(match request {
        Request::Describe => json!({
            "version": match side {
                Side::MetalCandle => env!("CARGO_PKG_VERSION"),
                Side::Candle => "0.11.1",
            },
            "threads": rayon::current_num_threads(),
            "machine": Machine::this(),
        }),
        Request::Rows { shape, gpu } => all_rows(shape.as_deref(), gpu)?,
        Request::Peaks => json!(Peaks::measure(device, 1 << 30)?),
        Request::Checkpoint { shape, seed, folder } => {
            write_checkpoint(&shape, device, seed, &folder)?;
            json!({})
        }
        Request::Convert { model, format, path } => {
            let format: ModelFormat = format.parse().map_err(anyhow::Error::msg)?;
            Model::load(model, DType::F32, &Device::Cpu)?.save_as(path, format, None)?;
            json!({})
        }
        Request::Prepare { row: wanted, inputs, model, adapter } => {
            *workload = None;
            let inputs = Inputs(safetensors::load(inputs, &Device::Cpu)?);
            let on_device = || inputs.of(&wanted.work, device);
            *workload = match side {
                Side::MetalCandle if wanted.work.is_operation() => {
                    Some(operations::prepare(&wanted.work, &on_device()?)?)
                }
                Side::MetalCandle => {
                    Some(on_a_model(&wanted.work, device, &inputs, model, adapter)?)
                }
                Side::Candle => plain::prepare(&wanted.work, &on_device()?)?,
            };
            *row = Some(*wanted);
            devices::reset_peak_memory(device)?;
            match workload {
                Some(_) => json!({}),
                None => json!({"unsupported": "plain Candle has nothing for this"}),
            }
        }
        Request::Outputs { path } => {
            let (Some(workload), Some(row)) = (workload, row) else { bail!(ready) };
            workload.reset()?;
            let results = workload.call()?;
            // Readers in Python know no bf16.
            let readable = |result: &Tensor| match result.dtype() {
                DType::BF16 => result.to_device(&Device::Cpu)?.to_dtype(DType::F32),
                _ => result.to_device(&Device::Cpu),
            };
            let results = results.iter().map(readable);
            let results = results.collect::<candle_core::Result<Vec<_>>>()?;
            let named: HashMap<&str, Tensor> =
                row.work.outputs().iter().copied().zip(results).collect();
            safetensors::save(&named, path)?;
            json!({})
        }
        Request::Time { queue, calls, warm_up: seconds } => {
            let Some(workload) = workload else { bail!(ready) };
            let workload = workload.as_mut();
            if seconds > 0.0 {
                warm_up(workload, device, Duration::from_secs_f64(seconds))?;
            }
            let seconds = if queue {
                vec![in_a_queue(workload, device, calls)?]
            } else {
                one_by_one(workload, device, calls)?
            };
            json!({"seconds": seconds})
        }
        Request::Memory => match devices::memory(device)? {
            Some(memory) => json!({"peak": memory.peak}),
            None => json!({"peak": peak_resident_bytes()}),
        },
        Request::Release => {
            *workload = None;
            json!({})
        }
    })
}

/// Every row with what the driver has to know of it.
fn all_rows(shape: Option<&str>, gpu: bool) -> anyhow::Result<Value> {
    let operations = if gpu { rows::gpu_operations() } else { rows::operations() };
    let rows = operations.into_iter().chain(rows::models(shape.unwrap_or("smollm2-135m")));
    let rows = rows.map(|row| {
        let mut value = serde_json::to_value(&row)?;
        if let Some(map) = value.as_object_mut() {
            map.insert("inputs".into(), json!(row.work.inputs()));
            map.insert("outputs".into(), json!(row.work.outputs()));
            map.insert("cost".into(), json!(row.work.cost()?));
            let calls = row.work.can_queue().then(|| queue_length(row.work.result_bytes(), gpu));
            map.insert("queue".into(), json!(calls));
            map.insert("ids".into(), json!(model::id_count(&row.work)));
        }
        Ok(value)
    });
    Ok(json!({"rows": rows.collect::<anyhow::Result<Vec<_>>>()?}))
}

/// A model with random weights in bf16, so that those who compute in f32 read the same numbers.
fn write_checkpoint(shape: &str, device: &Device, seed: u64, folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    let model = model::random(shape, Precision::Bf16, device, None, seed)?;
    Ok(model.save(folder, DType::BF16, None)?)
}

fn on_a_model(
    work: &Work,
    device: &Device,
    inputs: &Inputs,
    folder: Option<PathBuf>,
    adapter: Option<PathBuf>,
) -> anyhow::Result<Box<dyn Workload>> {
    let folder = folder.context("no model: expected its folder or file")?;
    let dtype = work.precision().dtype();
    let model = Model::load_with(folder, dtype, device, work.quantization())?;
    let adapter = match (work, adapter) {
        (Work::Train { .. }, Some(folder)) => Some(Adapter::load(&model, folder)?),
        _ => None,
    };
    let ids = inputs.get("ids")?.flatten_all()?.to_vec1::<u32>()?;
    Ok(model::prepare(work, model, adapter, &ids)?)
}
