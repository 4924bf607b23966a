"""The code of an environment of another framework: sums, each of which is one request to the model, with reward 1."""

CODE = """
import json, urllib.request

class Sums:
    def __init__(self, tasks):
        self.tasks = tasks

    def run(self, task, base_url):
        body = {"model": "policy", "messages": [{"role": "user", "content": f"What is {task}?"}]}
        headers = {"content-type": "application/json", "authorization": "Bearer x"}
        request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
        json.loads(urllib.request.urlopen(request).read())
        return {"reward": 1.0}
"""
