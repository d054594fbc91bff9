//! The kernels of all operations as one library a device, compiled when the first is used, and their
//! pipelines.

use super::encode::metal_error;
use super::source::source;
use candle_core::metal_backend::{DeviceId, MetalDevice};
use candle_core::{Result, bail};
use candle_metal_kernels::metal::{ComputePipeline, Library};
use objc2_metal::{MTLCompileOptions, MTLLanguageVersion};
use std::sync::RwLock;

struct Compiled {
    libraries: Vec<(DeviceId, Library)>,
    /// There are few: a search that compares addresses of names is faster than one that reads them.
    pipelines: Vec<(DeviceId, &'static str, ComputePipeline)>,
}

static COMPILED: RwLock<Compiled> =
    RwLock::new(Compiled { libraries: Vec::new(), pipelines: Vec::new() });

/// The pipeline of the kernel `name`.
pub(super) fn pipeline(device: &MetalDevice, name: &'static str) -> Result<ComputePipeline> {
    let id = device.id();
    if let Ok(compiled) = COMPILED.read() {
        let found = compiled
            .pipelines
            .iter()
            .find(|(device, known, _)| *device == id && std::ptr::eq(*known, name));
        if let Some((_, _, pipeline)) = found {
            return Ok(pipeline.clone());
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
    let function = library.get_function(name, None).map_err(metal_error)?;
    let pipeline = device
        .metal_device()
        .new_compute_pipeline_state_with_function(&function)
        .map_err(metal_error)?;
    compiled.pipelines.push((id, name, pipeline.clone()));
    Ok(pipeline)
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
