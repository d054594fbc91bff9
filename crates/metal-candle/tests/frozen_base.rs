//! A frozen base costs nothing in the backward pass: nothing of the size of a weight is ever
//! allocated while a LoRA step runs.

use candle_core::{DType, Device};
use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::autograd::Tape;
use metal_candle::data::Batch;
use metal_candle::model::{Config, Model};
use metal_candle::train::Gradients;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Remembers the largest single allocation and the most bytes held at once.
struct Counting;

static LARGEST: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn batch() -> Batch {
    let ids: Vec<u32> = (0..8).collect();
    Batch {
        rows: 1,
        length: 8,
        targets: ids.iter().map(|id| id + 1).collect(),
        positions: ids.clone(),
        input_ids: ids,
        first_key: vec![0; 8],
        tokens: 8,
        target_tokens: 8,
        ..Batch::default()
    }
}

/// One forward and backward pass; the largest allocation and the most bytes held beyond the start.
fn step(model: &Model, adapter: &Arc<Adapter>) -> (usize, usize) {
    let gradients = Gradients::new(adapter.parameters()).unwrap();
    let start = HELD.load(Ordering::Relaxed);
    LARGEST.store(0, Ordering::Relaxed);
    MOST.store(start, Ordering::Relaxed);
    let tape = Tape::training();
    let loss = model.loss(&tape, &batch(), Some(adapter)).unwrap();
    tape.backward(&loss.sum, 1.0, &mut &gradients).unwrap();
    (LARGEST.load(Ordering::Relaxed), MOST.load(Ordering::Relaxed) - start)
}

#[test]
fn a_lora_step_allocates_nothing_as_large_as_a_frozen_weight() {
    // The linear weights of this model are 16 MiB each, its activations under 200 KiB.
    let config = Config::from_json(
        r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": true,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5}"#,
    )
    .unwrap();
    let weight = 1024 * 4096 * size_of::<f32>();

    let model = Model::random(config, DType::F32, &Device::Cpu, 0).unwrap();
    let lora = LoraConfig { rank: 4, alpha: 16.0, ..LoraConfig::default() };
    let adapter = Arc::new(Adapter::new(&model, &lora, 0).unwrap());
    step(&model, &adapter);
    let (largest, most) = step(&model, &adapter);
    assert!(largest < weight / 2, "one allocation of {largest} bytes; a weight has {weight}");
    assert!(most < weight, "{most} bytes held at once; a weight has {weight}");

    // The check can fail: with every weight trained, gradients of that size exist.
    let adapter = Arc::new(Adapter::full(&model).unwrap());
    let (largest, _) = step(&model, &adapter);
    assert!(largest >= weight, "{largest}");
}
