"""The quick start of Hugging Face Accelerate, attached: the marked lines are ours.

    python examples/accelerate_quickstart.py            in one terminal
    consumer --callbacks speed,lr,metrics               in another, before it or while it runs; --last: after it
    offloop send NAME stop                          stops it after the current batch; NAME is in its output

Source: https://huggingface.co/docs/accelerate/quicktour; its model and data are small ones here.
"""

import sys

import torch
from accelerate import Accelerator

from offloop.accelerate import attach  # <- this

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
torch.manual_seed(0)
rows = torch.randn(4096, 16)
dataset = torch.utils.data.TensorDataset(rows, (rows[:, :4].sum(1) > 0).long())
training_dataloader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.5)
loss_function = torch.nn.CrossEntropyLoss()

accelerator = Accelerator()
model, optimizer, training_dataloader, scheduler = accelerator.prepare(model, optimizer, training_dataloader, scheduler)
run = attach(accelerator, max_duration=f"{epochs}ep")  # <- this

for epoch in range(epochs):
    for batch in training_dataloader:
        optimizer.zero_grad()
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        if run.stop_requested:  # <- this
            break
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    if run.stop_requested:  # <- this
        break
accelerator.end_training()
