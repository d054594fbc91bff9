//! The kernels of all operations as one library a device, compiled when the first is used, and their
//! pipelines, by name and function constants.

use super::encode::metal_error;
use super::source::source;
use super::{Constant, Kernel};
use candle_core::metal_backend::{DeviceId, MetalDevice};
use candle_core::{Result, bail};
use candle_metal_kernels::metal::{ComputePipeline, ConstantValues, Library, Value};
use objc2_metal::{MTLCompileOptions, MTLLanguageVersion};
use std::sync::RwLock;

struct Compiled {
    libraries: Vec<(DeviceId, Library)>,
    pipelines: Vec<Known>,
}

/// A pipeline that was made. There are few: a search that compares addresses of names is faster than one that
/// reads them.
struct Known {
    device: DeviceId,
    name: &'static str,
    constants: Box<[(usize, Constant)]>,
    pipeline: ComputePipeline,
}

static COMPILED: RwLock<Compiled> =
    RwLock::new(Compiled { libraries: Vec::new(), pipelines: Vec::new() });

/// The pipeline of a kernel, made for its function constants when they are asked for first.
pub(super) fn pipeline(device: &MetalDevice, kernel: Kernel) -> Result<ComputePipeline> {
    let id = device.id();
    let Kernel { name, constants } = kernel;
    if let Ok(compiled) = COMPILED.read() {
        let found = compiled.pipelines.iter().find(|known| {
            known.device == id && std::ptr::eq(known.name, name) && *known.constants == *constants
        });
        if let Some(known) = found {
            return Ok(known.pipeline.clone());
        }
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
    let values = (!constants.is_empty()).then(|| values_of(constants));
    let function = library.get_function(name, values.as_ref()).map_err(metal_error)?;
    let pipeline = device
        .metal_device()
        .new_compute_pipeline_state_with_function(&function)
        .map_err(metal_error)?;
    let (constants, made) = (constants.into(), pipeline.clone());
    compiled.pipelines.push(Known { device: id, name, constants, pipeline: made });
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
