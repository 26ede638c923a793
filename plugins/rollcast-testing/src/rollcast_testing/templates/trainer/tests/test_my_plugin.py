from rollcast_testing import TrainerSuite


class TestMyPlugin(TrainerSuite):
    name = "my_plugin"

    def overrides(self, task, run_dir):
        return [
            "trainer=sft",
            "trainer.name=my_plugin",
            f"run_dir={run_dir}",
            f"model.path={task.model}",
            f"data.train_files=[{task.train}]",
            f"data.val_files=[{task.val}]",
            "data.train_batch_size=4",
            "actor.optim.lr=1e-2",
            "trainer.save_freq=1",
        ]
