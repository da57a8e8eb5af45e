"""From a configuration to an mp4: settings of the video, ranks started and watched."""
