//! Times the element-wise and row operations, in microseconds a call, output included: the fastest
//! and the middle one of many calls on one tensor that is in the cache.
//!
//! ```text
//! cargo run --release -p metal-candle-kernels --example time_operations [words of the rows to time]
//! ```

use candle_core::{DType, Device, Result, Tensor};
use metal_candle_kernels::{glu, layer_norm, rms_norm, rope, softmax};
use std::time::{Duration, Instant};

fn time(name: &str, mut call: impl FnMut() -> Result<()>) -> Result<()> {
    if std::env::args().skip(1).any(|word| !name.contains(&word)) {
        return Ok(());
    }
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < 20 || start.elapsed() < Duration::from_millis(300) {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    println!("{name:60} {:10.2} {:10.2}", times[0], times[times.len() / 2]);
    Ok(())
}

fn main() -> Result<()> {
    println!("{:60} {:>10} {:>10}", "microseconds", "fastest", "middle");
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let random =
            |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?.to_dtype(dtype);
        let rows = [4, 16, 1024];
        let (x, dy, dsum) = (random(&rows)?, random(&rows)?, random(&rows)?);
        let (weight, bias) = (random(&[1024])?, random(&[1024])?);
        let name = |operation: &str| format!("{operation} (4, 16, 1024) {}", dtype.as_str());
        time(&name("softmax"), || softmax::forward(&x).map(drop))?;
        let y = softmax::forward(&x)?;
        time(&name("softmax backward"), || softmax::backward(&y, &dy).map(drop))?;
        time(&name("layer_norm"), || {
            layer_norm::forward(&x, &weight, Some(&bias), 1e-5).map(drop)
        })?;
        for (name, dweight) in
            [(name("layer_norm backward dx"), false), (name("layer_norm backward all"), true)]
        {
            let needs = layer_norm::Needs { dx: true, dweight, dbias: dweight };
            time(&name, || layer_norm::backward(&x, &weight, 1e-5, &dy, needs).map(drop))?;
        }
        time(&name("rms_norm"), || rms_norm::forward(&x, &weight, 1e-5, 0.0).map(drop))?;
        for (name, need) in
            [(name("rms_norm backward dx"), false), (name("rms_norm backward all"), true)]
        {
            time(&name, || rms_norm::backward(&x, &weight, 1e-5, 0.0, &dy, true, need).map(drop))?;
        }
        time(&name("rms_norm residual"), || {
            rms_norm::forward_residual(&x, &dy, &weight, 1e-5, 0.0).map(drop)
        })?;
        time(&name("rms_norm residual backward"), || {
            rms_norm::backward_residual(&x, &weight, 1e-5, 0.0, &dy, Some(&dsum), false).map(drop)
        })?;
        for activation in [glu::Activation::Silu, glu::Activation::GeluTanh, glu::Activation::Gelu]
        {
            time(&name(&format!("glu {activation:?}")), || {
                glu::forward(&x, &dy, activation).map(drop)
            })?;
            time(&name(&format!("glu {activation:?} backward")), || {
                glu::backward(&x, &dy, activation, &dsum).map(drop)
            })?;
        }
        let heads = x.reshape((4, 16, 16, 64))?;
        let angles = Tensor::randn(0f32, 1.0, (4, 16, 32), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        time(&name("rope"), || rope::forward(&heads, &cos, &sin).map(drop))?;
    }
    Ok(())
}
