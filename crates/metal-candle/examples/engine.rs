//! Many questions to one model at once: `cargo run --release --example engine -- MODEL 'Why is the sky blue?' ...`

use metal_candle::engine::{EngineOptions, Handle, Request};
use metal_candle::generate::GenerateOptions;
use metal_candle::model::Model;
use metal_candle::text::{Message, RenderOptions, Tokenizer};
use metal_candle::{DType, Device, hub};
use std::error::Error;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("give a model's folder or name, and questions")?;
    let folder = hub::resolve(&model, None)?;
    let tokenizer = Arc::new(Tokenizer::load(&folder)?);
    let model = Arc::new(Model::load(&folder, DType::F32, &Device::Cpu)?);
    let engine = Handle::start(&model, Some(tokenizer.clone()), EngineOptions::default())?;

    let render = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let template = tokenizer.require_chat_template()?;
    let mut under_way = Vec::new();
    for question in arguments {
        let text = template.render(&[Message::new("user", &*question)], &render)?;
        let request = Request {
            prompt: tokenizer.encode(&text, false)?,
            options: GenerateOptions { max_tokens: 100, ..GenerateOptions::default() },
            ..Request::default()
        };
        // All are written at once from here on; a thread could listen to each.
        under_way.push((question, engine.submit(request)));
    }
    for (question, answers) in under_way {
        println!("> {question}");
        for piece in answers {
            print!("{}", piece?.text);
        }
        println!();
    }
    Ok(())
}
