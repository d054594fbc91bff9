//! The kernels of all operations as one library a device, compiled when the first is used, and their
//! pipelines, by name and function constants.

use super::encode::metal_error;
use super::pipelines::Pipelines;
use super::source::source;
use super::{Constant, Kernel};
use candle_core::metal_backend::{DeviceId, MetalDevice};
use candle_core::{Result, bail};
use candle_metal_kernels::metal::{ComputePipeline, ConstantValues, Library, Value};
use objc2_metal::{MTLCompileOptions, MTLLanguageVersion};
use std::sync::RwLock;

struct Compiled {
    libraries: Vec<(DeviceId, Library)>,
    pipelines: Pipelines<DeviceId, ComputePipeline>,
}

static COMPILED: RwLock<Compiled> =
    RwLock::new(Compiled { libraries: Vec::new(), pipelines: Pipelines::new() });

/// The pipeline of a kernel, made for its function constants when they are asked for first.
pub(super) fn pipeline(device: &MetalDevice, kernel: Kernel) -> Result<ComputePipeline> {
    let id = device.id();
    if let Ok(compiled) = COMPILED.read()
        && let Some(pipeline) = compiled.pipelines.find(id, kernel)
    {
        return Ok(pipeline);
    }
    let Ok(mut compiled) = COMPILED.write() else {
        bail!("metal-candle-kernels: another thread failed while it compiled kernels")
    };
    let known = compiled.libraries.iter().find(|(device, _)| *device == id);
    let library = match known.map(|(_, library)| library.clone()) {
        Some(library) => library,
        None => {
            let library = compile(device)?;
            compiled.libraries.push((id, library.clone()));
            library
        }
    };
    let Kernel { name, constants } = kernel;
    let values = (!constants.is_empty()).then(|| values_of(constants));
    let function = library.get_function(name, values.as_ref()).map_err(metal_error)?;
    let pipeline = device
        .metal_device()
        .new_compute_pipeline_state_with_function(&function)
        .map_err(metal_error)?;
    compiled.pipelines.add(id, kernel, pipeline.clone());
    Ok(pipeline)
}

/// As Candle takes them.
fn values_of(constants: &[(usize, Constant)]) -> ConstantValues {
    let value = |constant: &Constant| match *constant {
        Constant::Bool(value) => Value::Bool(value),
        Constant::U16(value) => Value::U16(value),
    };
    ConstantValues::new(constants.iter().map(|(index, of)| (*index, value(of))).collect())
}

fn compile(device: &MetalDevice) -> Result<Library> {
    let options = MTLCompileOptions::new();
    // Fast math would assume that there is no NaN and no infinity. What replaces this option is
    // new in macOS 15.
    #[allow(deprecated)]
    options.setFastMathEnabled(false);
    // Without it, the version follows from the oldest macOS that the program was linked for, and `bfloat`
    // needs this one.
    options.setLanguageVersion(MTLLanguageVersion::Version3_1);
    device.metal_device().new_library_with_source(&source(), Some(&options)).map_err(metal_error)
}
