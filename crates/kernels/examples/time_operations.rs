//! Times the element-wise and row operations, in microseconds a call, output included: the fastest
//! and the middle one of many calls on one tensor that is in the cache.
//!
//! ```text
//! cargo run --release -p metal-candle-kernels --example time_operations [words of the rows to time]
//! ```

use candle_core::{DType, Device, Result, Tensor};
use metal_candle_kernels::{
    adamw, cross_entropy, glu, layer_norm, rms_norm, rope, sampling, softmax,
};
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

/// One token from a vocabulary of 150 000.
fn time_sampling() -> Result<()> {
    let logits = Tensor::randn(0f32, 4.0, 150_000, &Device::Cpu)?.to_vec1::<f32>()?;
    let scores: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    let mut workspace = sampling::Workspace::default();
    let off = sampling::Options { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
    for (name, options) in [
        ("greedy", sampling::Options { temperature: 0.0, ..off }),
        ("all", off),
        ("top-k 50", sampling::Options { top_k: 50, ..off }),
        ("top-p 0.9", sampling::Options { top_p: 0.9, ..off }),
        ("top-p 0.9, hot", sampling::Options { temperature: 3.0, top_p: 0.9, ..off }),
        ("min-p 0.05", sampling::Options { min_p: 0.05, ..off }),
    ] {
        time(&format!("sampling 150k {name}"), || {
            std::hint::black_box(workspace.draw(&scores, &options, 0.5));
            Ok(())
        })?;
    }
    time("sampling 150k log_sum_exp", || {
        std::hint::black_box(sampling::log_sum_exp(&logits));
        Ok(())
    })
}

/// The optimiser over 10 million parameters, and one pass over its bytes for comparison.
fn time_adamw() -> Result<()> {
    let n = 10_000_000;
    let random = || Tensor::randn(0f32, 1.0, n, &Device::Cpu);
    let (params, grads, m) = (random()?, random()?, random()?);
    let v = random()?.sqr()?;
    let options = adamw::Options {
        learning_rate: 1e-6,
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.01,
    };
    time("adamw norm 10M", || adamw::norm(&grads).map(drop))?;
    time("adamw step 10M", || adamw::step(&params, &grads, &m, &v, 9, 1.0, n, &options))?;
    time("adamw clipped_step 10M", || {
        adamw::clipped_step(&params, &grads, &m, &v, 9, Some(1.0), n, &options).map(drop)
    })?;
    time("adamw fill_zero 10M", || adamw::fill_zero(&grads))?;
    time("adamw accumulate 10M", || adamw::accumulate(&params, &grads, 1.0))
}

/// The rows of the head's cross entropy: the head itself has one input, so that it costs little.
fn time_cross_entropy() -> Result<()> {
    let hidden = Tensor::randn(0f32, 1.0, (64, 1), &Device::Cpu)?;
    let weight = Tensor::randn(0f32, 1.0, (49152, 1), &Device::Cpu)?;
    let targets = Tensor::zeros(64, DType::U32, &Device::Cpu)?;
    for (name, softcap, need) in [
        ("cross_entropy (64, 49152) loss only", None, false),
        ("cross_entropy (64, 49152)", None, true),
        ("cross_entropy (64, 49152) softcap", Some(30.0), true),
    ] {
        let options = cross_entropy::Options { softcap, logit_scale: 1.0, chunk: 64 };
        time(name, || {
            cross_entropy::forward(&hidden, &weight, &targets, &options, need, false).map(drop)
        })?;
    }
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
                glu::backward(&x, &dy, activation, &dsum, true, true).map(drop)
            })?;
        }
        let heads = x.reshape((4, 16, 16, 64))?;
        let angles = Tensor::randn(0f32, 1.0, (4, 16, 32), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        time(&name("rope"), || rope::forward(&heads, &cos, &sin).map(drop))?;
    }
    time_cross_entropy()?;
    time_sampling()?;
    time_adamw()
}
