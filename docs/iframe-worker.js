// From a folder, browsers start no worker: then a hidden frame runs the search's script.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data =>
        this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      this.loaded = new Promise(resolve => (script.onload = resolve))
      frame.contentDocument.body.append(script)
    }
    async postMessage(data) {
      await this.loaded
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
    }
    terminate() {}
  }
